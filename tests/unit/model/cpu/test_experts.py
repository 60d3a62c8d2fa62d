"""Which experts compute a row, with which factors, and what is added."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from microturn.model.cpu import experts

NUM_EXPERTS, NUM_CHOSEN, HIDDEN = 6, 3, 16
_SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": NUM_CHOSEN}


def _routers() -> dict[str, tuple[torch.nn.Module, bool]]:
    mixtral = MixtralConfig(num_local_experts=NUM_EXPERTS, **_SIZES)
    qwen = {norm: Qwen3MoeConfig(num_experts=NUM_EXPERTS, norm_topk_prob=norm, **_SIZES) for norm in (True, False)}
    return {
        "mixtral": (MixtralTopKRouter(mixtral), True),
        "of chosen": (Qwen3MoeTopKRouter(qwen[True]), True),
        "of all": (Qwen3MoeTopKRouter(qwen[False]), False),
    }


@pytest.mark.parametrize("name", _routers())
@torch.inference_mode()
def test_factors_are_those_of_transformers_routers(name: str) -> None:
    router, is_normalised = _routers()[name]
    router.weight.normal_()
    logits, theirs, chosen = router(torch.randn(50, HIDDEN))
    expected = torch.zeros(50, NUM_EXPERTS).scatter_(1, chosen, theirs)
    factors = logits.numpy().copy()
    experts.choose(factors, NUM_EXPERTS, NUM_CHOSEN, is_normalised, has_shared=False)
    torch.testing.assert_close(torch.from_numpy(factors), expected)
    assert ((factors > 0).sum(1) == NUM_CHOSEN).all()


def test_what_is_behind_the_experts_is_no_expert() -> None:
    factors = np.array([[0, 1, 9, 9], [1, 0, -2, 9]], np.float32)
    experts.choose(factors, 2, 1, is_normalised=True, has_shared=True)
    assert factors[:, :2].tolist() == [[0, 1], [1, 0]]
    torch.testing.assert_close(torch.from_numpy(factors[:, 2]), torch.tensor([9.0, -2.0]).sigmoid())
    assert factors[:, 3].tolist() == [9, 9]


def test_of_equal_experts_the_first_ones_are_chosen() -> None:
    factors = np.ones((1, 4), np.float32)
    experts.choose(factors, 4, 2, is_normalised=True, has_shared=False)
    assert factors.tolist() == [[0.5, 0.5, 0, 0]]


def test_a_row_that_is_not_a_number_stays_so_and_keeps_to_itself() -> None:
    factors = np.array([[np.nan, 1, 2], [np.inf, 1, 2], [0, 2, 1]], np.float32)
    experts.choose(factors, 3, 1, is_normalised=False, has_shared=False)
    assert np.isnan(factors[:2]).any(1).all()
    assert factors[2, 1] > 0.5


def test_an_expert_s_rows_are_gathered_and_its_results_added_to_them() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    factors = np.array([[0, 2], [1, 0], [0, 3], [0, 0]], np.float32)
    rows, given = np.empty(4, np.int64), np.empty((4, 3), np.float32)
    count = experts.gather(x, factors, 1, rows, given)
    assert rows[:count].tolist() == [0, 2]
    assert (given[:count] == x[[0, 2]]).all()
    out = np.ones_like(x)
    experts.add(given[:count], factors, 1, rows, out)
    assert (out == 1 + factors[:, 1:] * x).all()
