"""The product of integers against torch's in float64, which is exact, over whole and part tiles and panels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from microturn.kv.quantization import quantize
from microturn.model.cpu import amx_kernels, amx_products, int8_kernels
from microturn.model.cpu.int8_products import (
    MOST_WIDTH,
    PANEL,
    PANELS_AT_ONCE,
    QUAD,
    STEP,
    StepType,
    empty_panels,
)
from microturn.model.cpu.integer_products import UNSIGNED_OFFSET
from support.rounded import rotated

Kernel = Callable[..., None]

OUT_STEP = PANELS_AT_ONCE * PANEL


@pytest.fixture(params=["vectors", "amx"])
def multiply(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "vectors":
        return int8_kernels.multiply
    if not amx_products.is_available():
        pytest.skip("this CPU has no AMX")
    return partial(amx_kernels.multiply, num_threads=numba.get_num_threads())


def in_panels(weight: Tensor) -> NDArray[np.uint8]:
    """Integers [out, in] in the order of reading."""
    num_out, num_in = weight.shape
    unsigned = np.zeros((-(-num_out // OUT_STEP) * OUT_STEP, num_in + -num_in % STEP), np.uint8)
    unsigned[:num_out, :num_in] = weight.numpy().astype(np.int16) + UNSIGNED_OFFSET
    panels = empty_panels(num_out, num_in)
    panels[:] = unsigned.reshape(len(panels), PANEL, -1, QUAD).transpose(0, 2, 1, 3)
    return panels.reshape(len(panels), -1)


def product(kernel: Kernel, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Of integers [rows, in] and [out, in] with scales."""
    num_out, width = weight.shape
    out = torch.full((len(x), num_out), float("nan"))
    steps = pad(x, (0, -width % STEP, 0, -len(x) % amx_products.TILE_ROWS)).numpy().astype(StepType)
    offsets = (-UNSIGNED_OFFSET * x.sum(1)).numpy().astype(np.int32)
    padded_scales = torch.cat((weight_scales, torch.ones(-num_out % OUT_STEP)))
    panels = in_panels(weight)
    kernel(steps, x_scales.numpy(), offsets, panels, padded_scales.numpy(), out.numpy())
    return out


def expected(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    sums = (x.double() @ weight.double().t()).float()
    return sums * weight_scales * x_scales[:, None]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 11, 16, 17, 35])
@pytest.mark.parametrize(
    ("num_out", "width"), [(1, STEP), (7, 5), (PANEL + 1, STEP + 1), (OUT_STEP + 3, 64), (960, 576), (12, 8192)]
)
def test_the_product_is_exact(multiply: Kernel, num_rows: int, num_out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    given = (
        torch.randint(-127, 128, (num_rows, width), generator=generator),
        2.0 ** torch.randint(-20, 20, (num_rows,), generator=generator),
        torch.randint(-127, 128, (num_out, width), dtype=torch.int8, generator=generator),
        torch.rand(num_out, generator=generator),
    )
    assert torch.equal(product(multiply, *given), expected(*given))


@pytest.mark.parametrize("width", [1, STEP, 576, 4096, MOST_WIDTH])
@pytest.mark.parametrize("sign", [-1, 1])
def test_nothing_saturates_and_no_sum_overflows(multiply: Kernel, width: int, sign: int) -> None:
    """All elements are as large as they may be: sums of pairs pass 16 bits, those of a row come near 32."""
    x = torch.full((5, width), sign * 127)
    weight = torch.full((PANEL, width), 127, dtype=torch.int8)
    weight[1] = -127
    given = (x, torch.ones(5), weight, torch.ones(PANEL))
    assert torch.equal(product(multiply, *given), expected(*given))


@pytest.mark.parametrize("num_rows", [2, 18])
def test_only_the_rows_and_columns_that_there_are_are_written(multiply: Kernel, num_rows: int) -> None:
    whole = torch.full((num_rows + 1, 7), 5.0)
    out = whole[:num_rows]
    weight = in_panels(torch.ones(7, STEP, dtype=torch.int8))
    steps = np.ones((-(-num_rows // amx_products.TILE_ROWS) * amx_products.TILE_ROWS, STEP), StepType)
    offsets = np.full(num_rows, -UNSIGNED_OFFSET * STEP, np.int32)
    multiply(steps, np.ones(num_rows, np.float32), offsets, weight, np.ones(OUT_STEP, np.float32), out.numpy())
    assert (out == STEP).all()
    assert (whole[num_rows] == 5).all()


@pytest.mark.parametrize(("num_out", "width"), [(7, 30), (311, 48), (960, 576)])
@pytest.mark.parametrize("ends", [[], [3, 4]])
def test_a_weight_is_rounded_as_any_vector(num_out: int, width: int, ends: list[int]) -> None:
    """In panels, bit for bit, at once or in parts; rows of zeros and with an infinity among them."""
    weight = torch.randn(num_out, width) * torch.logspace(-3, 3, num_out)[:, None]
    weight[1], weight[2, 3] = 0, float("inf")
    steps, scales = quantize(rotated(weight))
    panels, found = empty_panels(num_out, width), np.ones(num_out, np.float32)
    for begin, end in pairwise([0, *ends, num_out]):
        int8_kernels.round_weight(weight[begin:end].numpy(), begin, panels, found)
    assert (panels.reshape(len(panels), -1) == in_panels(steps)).all()
    assert np.array_equal(found, scales.numpy(), equal_nan=True)
