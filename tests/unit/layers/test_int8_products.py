"""The product of integers against torch's in float64, which is exact, over whole and part tiles and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.attention.native_vectors import LANES
from microturn.layers import int8_kernels
from microturn.layers.int8_products import PANEL, STEP, most_steps


def in_panels(weight: Tensor) -> NDArray[np.int8]:
    """Of a weight [whole panels, whole steps]."""
    panels = weight.view(-1, PANEL, weight.shape[1] // 2, 2)
    return panels.transpose(1, 2).contiguous().numpy()


def product(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, num_out: int) -> Tensor:
    out = torch.full((len(x), num_out), float("nan"))
    int8_kernels.multiply(x.numpy(), x_scales.numpy(), in_panels(weight), weight_scales.numpy(), out.numpy())
    return out


def expected(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, num_out: int) -> Tensor:
    sums = (x.double() @ weight[:num_out].double().t()).float()
    return sums * weight_scales[:num_out] * x_scales[:, None]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("num_out", "width"), [(1, STEP), (7, STEP), (PANEL + LANES + 1, 64), (960, 576), (12, 8192)])
def test_the_product_is_exact(num_rows: int, num_out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    padded = -(-num_out // PANEL) * PANEL
    most = most_steps(width)
    given = (
        torch.randint(-most, most + 1, (num_rows, width), dtype=torch.int16, generator=generator),
        torch.rand(num_rows, generator=generator),
        torch.randint(-127, 128, (padded, width), dtype=torch.int8, generator=generator),
        torch.rand(padded, generator=generator),
        num_out,
    )
    assert torch.equal(product(*given), expected(*given))


@pytest.mark.parametrize("width", [STEP, 576, 1536, 4096])
@pytest.mark.parametrize("sign", [-1, 1])
def test_nothing_saturates_and_no_sum_overflows(width: int, sign: int) -> None:
    """All elements are as large as they may be: sums of pairs pass 16 bits, those of a row come near 32."""
    x = torch.full((5, width), sign * most_steps(width), dtype=torch.int16)
    weight = torch.full((PANEL, width), 127, dtype=torch.int8)
    weight[1] = -127
    given = (x, torch.ones(5), weight, torch.ones(PANEL), PANEL)
    assert torch.equal(product(*given), expected(*given))


def test_only_the_columns_that_there_are_are_written() -> None:
    out = np.full((3, 7), 5.0, np.float32)
    x = np.ones((2, STEP), np.int16)
    weight, scales = torch.ones(PANEL, STEP, dtype=torch.int8), np.ones(PANEL, np.float32)
    int8_kernels.multiply(x, np.ones(2, np.float32), in_panels(weight), scales, out[:2])
    assert (out[:2] == STEP).all()
    assert (out[2] == 5).all()
