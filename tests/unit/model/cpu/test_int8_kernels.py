"""Rounding of rows, against the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from microturn.model.cpu import int8_kernels

MOST = 11_008


def quantized(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    steps, scales = torch.full((len(x), padded), 99, dtype=torch.int16), torch.empty(len(x))
    int8_kernels.quantize(x.numpy(), MOST, steps.numpy(), scales.numpy())
    return steps, scales


@pytest.mark.parametrize("width", [1, 30, 576])
def test_each_row_is_rounded_by_its_own_scale_and_padded_with_zeros(width: int) -> None:
    x = torch.randn(6, width) * torch.tensor([1e-30, 1e-3, 1, 7, 1e4, 1e30])[:, None]
    steps, scales = quantized(x, width + 34)
    assert torch.equal(steps[:, :width].abs().amax(1), torch.full((6,), MOST, dtype=torch.int16))
    assert ((steps[:, :width] * scales[:, None] - x).abs() <= 0.501 * scales[:, None]).all()
    assert not steps[:, width:].any()


def test_zeros_stay_zeros_and_what_is_not_finite_is_told_by_the_scale() -> None:
    x = torch.ones(4, 48)
    x[0] = 0
    x[1, 5], x[2, 7] = float("nan"), float("-inf")
    steps, scales = quantized(x, 64)
    assert not steps[0].any()
    assert scales[0] > 0
    assert scales[1:].isfinite().tolist() == [False, False, True]
