"""The soft cap of logits against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from microturn.model.cpu import soft_caps
from microturn.model.cpu.vectors import LANES
from microturn.model.scores import soft_capped


def capped(logits: Tensor, soft_cap: float) -> Tensor:
    out = logits.clone()
    soft_caps.cap(out.numpy(), np.float32(soft_cap))
    return out


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("width", [LANES, LANES + 1, 3 * LANES - 1, 311])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_logits_are_capped_once(num_rows: int, width: int, soft_cap: float) -> None:
    logits = torch.randn(num_rows, width, dtype=torch.float64) * soft_cap
    got = capped(logits.float(), soft_cap)
    torch.testing.assert_close(got.double(), soft_capped(logits, soft_cap), atol=3e-7 * soft_cap, rtol=0)


def test_an_element_has_the_same_bits_wherever_it_is() -> None:
    logits = torch.randn(1, 83) * 30
    got = capped(logits, 30.0)
    for shift in range(83):
        assert torch.equal(capped(logits.roll(shift), 30.0), got.roll(shift))


def test_large_logits_are_the_cap_and_what_is_not_a_number_stays_so() -> None:
    logits = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), 0.0, 1e-30, float("nan"), 3e38]).repeat(
        1, LANES // 8
    )
    expected = torch.tensor([5.0, -5.0, 5.0, -5.0, 0.0, 0.0, float("nan"), 5.0]).repeat(1, LANES // 8)
    torch.testing.assert_close(capped(logits, 5.0), expected, equal_nan=True)
