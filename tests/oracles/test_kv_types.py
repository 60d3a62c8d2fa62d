"""A KV cache in bfloat16 or int8: incremental = full as far as rounding lets it be, and logits near those of float32.

Each token's numbers are rounded by themselves, so that no split and no company has a part in it, but for this: a number
that lies between two of the type may fall to the other side when it was computed in another order. The next layer works
on what it fell to, so a float's last digit can become a step of the type, first in one element of thousands and with
every layer in more of them. In three layers that is far less than what the type itself changes; in thirty it is as
much: another draw of the same noise. What attention makes of the same pages is held to the last digits, in
`unit/model/cpu/test_attention_kernels.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv import layer_pages
from microturn.kv.page_layout import PageLayout
from microturn.model.batch import Batch, Row
from microturn.model.cpu.attention_operands import HAS_BFLOAT16
from microturn.model.runner import ModelRunner
from support.driver import model_runner
from support.models import VOCAB_SIZE
from support.oracle import check_incremental, one_shot_logits, stock_logits, tolerance_of
from support.paths import PATHS

TYPES = pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)

# Largest difference of two logits that such steps explain in three layers; 0.01 was seen. The spread of logits is 2.
STEPS = 0.03

# Root mean square of what a type changes, relative to the spread of logits; half of it was seen, or 0.045 where queries
# and weights are rounded to bfloat16 too, and 0.14 where they are to int8: with random tokens, in SmolLM2's 30 layers.
NEARNESS = {torch.bfloat16: 0.08 if HAS_BFLOAT16 else 0.04, torch.int8: 0.2}


def distance(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences, relative to the spread of what is expected."""
    return float((got - expected).square().mean().sqrt() / expected.std())


@PATHS
@TYPES
@pytest.mark.parametrize(("seed", "num_sessions"), [(0, 1), (2, 5)])
def test_any_split_in_any_company_gives_the_logits_of_the_whole(
    tiny_model: PreTrainedModel,
    seed: int,
    num_sessions: int,
    kv_dtype: torch.dtype,
    new_runner: Callable[..., ModelRunner],
) -> None:
    check_incremental(
        tiny_model,
        range(VOCAB_SIZE),
        seed=seed,
        num_sessions=num_sessions,
        new_runner=new_runner,
        kv_dtype=kv_dtype,
        tolerance=max(STEPS, tolerance_of(tiny_model)),
    )


@pytest.mark.all_processors
@TYPES
def test_logits_stay_near_those_of_float32(tiny_model: PreTrainedModel, kv_dtype: torch.dtype) -> None:
    ids = random.Random(5).choices(range(VOCAB_SIZE), k=300)
    exact = stock_logits(tiny_model, ids)
    by_torch = one_shot_logits(tiny_model, ids, kv_dtype)
    native = one_shot_logits(tiny_model, ids, kv_dtype, layout=PageLayout.PANELS)
    assert 1e-4 < distance(native, exact) <= NEARNESS[kv_dtype]
    if HAS_BFLOAT16 or kv_dtype == torch.int8:
        assert distance(native, by_torch) <= NEARNESS[kv_dtype]
    else:
        assert (native - by_torch).abs().max() <= max(STEPS, tolerance_of(tiny_model))


@pytest.mark.all_processors
@TYPES
def test_real_weights_stay_near_float32_in_turns_and_in_one(real_model: PreTrainedModel, kv_dtype: torch.dtype) -> None:
    ids = random.Random(5).choices(range(17, 49152), k=200)
    exact = stock_logits(real_model, ids)
    whole = one_shot_logits(real_model, ids, kv_dtype)
    runner = model_runner(real_model, num_pages=13, kv_dtype=kv_dtype, is_one_group=True)
    cuts = [0, *range(1, 20), *range(20, 200, 16), 200]
    in_turns = torch.cat([runner.run(Batch([Row(ids[a:b], a, list(range(13)))])) for a, b in pairwise(cuts)])
    last_of = [cut - 1 for cut in cuts[1:]]
    assert distance(whole, exact) <= NEARNESS[kv_dtype]
    assert distance(in_turns, exact[last_of]) <= NEARNESS[kv_dtype]
    # Two draws of the same noise.
    assert distance(in_turns, whole[last_of]) <= 2**0.5 * NEARNESS[kv_dtype]


def test_the_oracle_sees_the_scales_of_other_tokens(
    attending_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dequantize = layer_pages.dequantize
    monkeypatch.setattr(layer_pages, "dequantize", lambda steps, scales: dequantize(steps, scales.roll(1, 3)))
    ids = random.Random(5).choices(range(VOCAB_SIZE), k=300)
    got = one_shot_logits(attending_model, ids, torch.int8)
    # The scales of others may be memory that nobody wrote, and so the distance not a number: as far as any.
    assert not distance(got, stock_logits(attending_model, ids)) <= NEARNESS[torch.int8]
