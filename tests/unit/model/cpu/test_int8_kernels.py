"""Rounding of rows, against the same in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from microturn.model.cpu import int8_kernels
from microturn.model.cpu.int8_products import StepType
from microturn.model.cpu.integer_products import UNSIGNED_OFFSET
from support.rounded import rotated


def quantized(x: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    steps = np.full((len(x), padded), 99, StepType)
    scales, offsets = np.empty(len(x), np.float32), np.empty(len(x), np.int32)
    int8_kernels.quantize(x.numpy(), steps, scales, offsets)
    return torch.from_numpy(steps), torch.from_numpy(scales), torch.from_numpy(offsets)


@pytest.mark.parametrize("width", [1, 30, 576])
@pytest.mark.parametrize("num_rows", [6, 12])
def test_each_row_is_rounded_by_its_own_scale_and_padded_with_zeros(width: int, num_rows: int) -> None:
    x = torch.randn(num_rows, width) * torch.logspace(-30, 30, num_rows)[:, None]
    steps, scales, offsets = quantized(x, width + 34)
    assert torch.equal(steps[:, :width].abs().amax(1), torch.full((num_rows,), 127, dtype=steps.dtype))
    assert ((steps[:, :width] * scales[:, None] - rotated(x)).abs() <= 0.501 * scales[:, None]).all()
    assert not steps[:, width:].any()
    assert torch.equal(offsets, (-UNSIGNED_OFFSET * steps.int().sum(1)).int())


def test_zeros_stay_zeros_and_what_is_not_finite_is_told_by_the_scale() -> None:
    x = torch.ones(4, 48)
    x[0] = 0
    x[1, 5], x[2, 7] = float("nan"), float("-inf")
    steps, scales, _ = quantized(x, 64)
    assert not steps[0].any()
    assert scales[0] > 0
    assert scales[1:].isfinite().tolist() == [False, False, True]
