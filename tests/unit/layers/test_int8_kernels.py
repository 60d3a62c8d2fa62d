"""Rounding of rows, and sums of two bytes put together, against the same in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from microturn.layers import int8_kernels

MOST = 11_008


def quantized(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    steps, scales = torch.full((len(x), padded), 99, dtype=torch.int16), torch.empty(len(x))
    int8_kernels.quantize(x.numpy(), MOST, steps.numpy(), scales.numpy())
    return steps, scales


def bytes_of(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    steps, scales = torch.full((2, len(x), padded), 99, dtype=torch.int8), torch.empty(len(x))
    int8_kernels.quantize_to_bytes(x.numpy(), MOST, steps.numpy(), scales.numpy())
    return steps, scales


@pytest.mark.parametrize("width", [1, 30, 576])
def test_each_row_is_rounded_by_its_own_scale_and_padded_with_zeros(width: int) -> None:
    x = torch.randn(6, width) * torch.tensor([1e-30, 1e-3, 1, 7, 1e4, 1e30])[:, None]
    steps, scales = quantized(x, width + 34)
    assert torch.equal(steps[:, :width].abs().amax(1), torch.full((6,), MOST, dtype=torch.int16))
    assert ((steps[:, :width] * scales[:, None] - x).abs() <= 0.501 * scales[:, None]).all()
    assert not steps[:, width:].any()


def test_two_bytes_are_the_same_steps() -> None:
    x = torch.randn(50, 576) * 10
    (high, low), scales = bytes_of(x, 640)
    steps, expected_scales = quantized(x, 640)
    assert torch.equal(256 * high.int() + low, steps.int())
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("rounding", [quantized, bytes_of], ids=["whole", "bytes"])
def test_zeros_stay_zeros_and_what_is_not_finite_is_told_by_the_scale(rounding: object) -> None:
    x = torch.ones(4, 48)
    x[0] = 0
    x[1, 5], x[2, 7] = float("nan"), float("-inf")
    steps, scales = rounding(x, 64)
    assert not steps[..., 0, :].any()
    assert scales[0] > 0
    assert scales[1:].isfinite().tolist() == [False, False, True]


def test_sums_may_run_over_as_long_as_their_total_does_not() -> None:
    totals = np.array([[2**31 - 1, -(2**31), 0, -1, 123_456_789]], np.int64)
    low = np.array([[-128, 127, -(2**31) + 5, 2**31 - 3, 77]], np.int64)
    high = (totals - low) // 256
    low = totals - 256 * high
    wrapped = np.stack([high + 2**24 * np.array([3, -5, 1, 2, 0]), low])  # 2**24 * 256 is 2**32: no change
    out, scales = np.empty((1, 5), np.float32), np.array([0.5, 2, 3, 1, 0.1], np.float32)
    int8_kernels.scale_sums(wrapped.astype(np.int32)[:, None, 0], np.array([0.25], np.float32), scales, out)
    expected = totals.astype(np.float32) * scales * np.float32(0.25)
    assert (out == expected).all()
