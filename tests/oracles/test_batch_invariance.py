"""Oracle 2 to the bit: other sessions, chunks and preemption change no bit of a logit, for every type of the KV."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from microturn.model.cpu import attention_work
from support import models
from support.invariance import FEW_PAGES, NUM_SESSIONS, Logits, logits_of, require_equal

pytestmark = pytest.mark.all_processors

TINY = ["grouped_heads", "sliding_window", "pairs_in_half_heads", "exact_gelu", "int8", "experts", "int8_experts"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        names = [*models.real_names(metafunc.config), *TINY]
        metafunc.parametrize("model", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    return models.by_name(request.param, device)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.int8], ids=str)
def kv_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, kv_dtype: torch.dtype) -> Logits:
    """Each session by itself, every append in one pass."""
    logits: Logits = {}
    for session in range(1, NUM_SESSIONS + 1):
        logits |= logits_of(model, [session], max_batch_tokens=2000, kv_dtype=kv_dtype)
    return logits


@pytest.mark.parametrize("max_batch_tokens", [5, 48, 500])
def test_other_sessions_and_chunks_change_no_bit(
    model: PreTrainedModel, alone: Logits, kv_dtype: torch.dtype, max_batch_tokens: int
) -> None:
    """With 500 there is a pass of so many tokens that torch would cut its activation among threads, amid a row."""
    sessions = range(1, NUM_SESSIONS + 1)
    require_equal(logits_of(model, sessions, max_batch_tokens=max_batch_tokens, kv_dtype=kv_dtype), alone)


def test_preemption_changes_no_bit(model: PreTrainedModel, alone: Logits, kv_dtype: torch.dtype) -> None:
    sessions = range(1, NUM_SESSIONS + 1)
    require_equal(logits_of(model, sessions, max_batch_tokens=64, num_pages=FEW_PAGES, kv_dtype=kv_dtype), alone)


def test_a_sum_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that begin at the row's oldest key instead of at fixed positions: the planted mistake of most engines."""
    model = models.grouped_heads()
    monkeypatch.setattr(
        attention_work, "_borders", lambda oldest, key_end, *_: [oldest, (oldest + key_end) // 2, key_end]
    )
    whole, chunks = (logits_of(model, [1], max_batch_tokens=n) for n in (2000, 5))
    assert any(not torch.equal(whole[at], chunks[at]) for at in whole)
