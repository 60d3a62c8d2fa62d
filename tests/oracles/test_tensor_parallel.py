"""The oracles with a model over two processes: incremental = full, company, preemption, and KV that comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from microturn.kv.page_layout import PageLayout
from microturn.model.batch import Batch
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.packed_batch import PackedBatch
from microturn.model.runner import ModelRunner
from support import models
from support.driver import Driver
from support.invariance import FEW_PAGES, NUM_SESSIONS, logits_of, require_equal
from support.models import VOCAB_SIZE
from support.oracle import check_incremental
from support.parallel_runner import parallel_runner
from support.rounded import rounded
from support.tiers import counters_of, move_all_out

# Norms of heads, biases, windows and soft caps, fused projections, factors and tied words.
SHAPES = ["grouped_heads", "biases", "soft_caps", "own_fusion", "factors"]

NewRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def new_runner() -> Iterator[NewRunner]:
    """Makes runners over two processes, one after another."""
    followers = Followers(2)
    yield partial(parallel_runner, followers)
    followers.close()


@pytest.fixture(params=[PageLayout.PANELS, PageLayout.HND], ids=["native", "as on a GPU"])
def either_runner(request: pytest.FixtureRequest, new_runner: NewRunner) -> NewRunner:
    """The same, with the layers of a CPU, or those of a GPU, which the engine runs ahead of."""
    return partial(new_runner, layout=request.param)


def int8() -> PreTrainedModel:
    """Each process rounds its part of the inputs of a sum with a scale of its own."""
    return rounded(models.grouped_heads(), num_ranks=2)


@pytest.mark.parametrize("name", SHAPES)
def test_any_split_in_any_company_gives_the_logits_of_the_whole(either_runner: NewRunner, name: str) -> None:
    model: PreTrainedModel = getattr(models, name)()
    check_incremental(model, range(VOCAB_SIZE), seed=2, num_sessions=5, new_runner=either_runner)


def test_with_8_bit_weights_too(new_runner: NewRunner) -> None:
    check_incremental(int8(), range(VOCAB_SIZE), seed=2, num_sessions=5, new_runner=new_runner)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["grouped_heads", "int8"])
def test_company_chunks_and_preemption_change_no_bit(new_runner: NewRunner, name: str, kv_dtype: torch.dtype) -> None:
    model = int8() if name == "int8" else models.grouped_heads()
    given: dict[str, Any] = {"kv_dtype": kv_dtype, "new_runner": new_runner}
    alone = {}
    for session in range(1, NUM_SESSIONS + 1):
        alone |= logits_of(model, [session], max_batch_tokens=2000, **given)
    sessions = range(1, NUM_SESSIONS + 1)
    require_equal(logits_of(model, sessions, max_batch_tokens=48, **given), alone)
    require_equal(logits_of(model, sessions, max_batch_tokens=64, num_pages=FEW_PAGES, **given), alone)


def test_pages_of_all_processes_come_back_from_host_memory(either_runner: NewRunner) -> None:
    prompts = {session: [(7 * session + 3 * at) % VOCAB_SIZE for at in range(90)] for session in (1, 2, 3)}
    answers = []
    for moves in (False, True):
        runner = either_runner(models.grouped_heads(), num_pages=32)
        driver = Driver(runner, num_pages=32, max_context=300, host_tier_bytes=1 << 30, share_prefixes=False)
        for session, prompt in prompts.items():
            driver.turn(session, prompt, start=True, max_tokens=3)
        if moves:
            move_all_out(driver)
            assert driver.pool.num_free == driver.pool.num_pages
            # Others take all pages, at both processes.
            driver.turn(4, [5] * 290, start=True, max_tokens=3)
            driver.turn(4, end=True)
        turns = [driver.turn(session, [9, 8, 7], max_tokens=20) for session in prompts]
        answers.append([turn.token_ids for turn in turns])
        assert all(turn.status.usage["computed_tokens"] == 3 + 20 for turn in turns), "the past was computed again"
        assert counters_of(driver).restored == (len(prompts) if moves else 0)
        driver.engine.stop()
    assert answers[0] == answers[1]


def test_a_process_that_reads_other_pages_is_found(new_runner: NewRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: what the other process attends to is not what this one does."""

    of = PackedBatch.of

    def with_pages_in_another_order(batch: Batch) -> PackedBatch:
        return of(Batch([row._replace(pages=row.pages[::-1]) for row in batch.rows]))

    monkeypatch.setattr(PackedBatch, "of", with_pages_in_another_order)
    with pytest.raises(AssertionError, match="the logits of token"):
        check_incremental(models.grouped_heads(), range(VOCAB_SIZE), seed=2, num_sessions=5, new_runner=new_runner)
