"""Products of 8-bit floats of many shapes, on any device, against float32 products of what the numbers stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from microturn.model.gpu import float8
from microturn.model.gpu.float8_linear import Float8Linear


class Case(NamedTuple):
    """Sizes of a product; `block` inputs have a scale in common."""

    num_rows: int
    num_in: int
    num_out: int
    block: int
    has_bias: bool = False


CASES = [
    Case(1, 64, 48, 64),
    Case(5, 128, 32, 128, has_bias=True),
    Case(70, 256, 144, 256),
    Case(1, 256, 48, 128),
    Case(3, 128, 200, 32, has_bias=True),
    Case(64, 128, 16, 64),
    Case(65, 256, 144, 128),
    Case(2, 512, 32, 128),
]


def check(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    """Raises AssertionError where a product is another than that of the numbers, by more than rounding to a type."""
    generator = torch.Generator().manual_seed(case.num_in)
    x, weight = (
        torch.randn(size, case.num_in, generator=generator).to(device, dtype) for size in (case.num_rows, case.num_out)
    )
    x *= torch.logspace(-3, 3, case.num_rows, device=device, dtype=torch.float32)[:, None].to(dtype)
    bias = torch.randn(case.num_out, generator=generator).to(device, dtype) if case.has_bias else None
    numbers, scales = float8.quantize(weight, case.block)
    got = Float8Linear(numbers, scales, bias)(x, x.new_empty(case.num_rows, case.num_out)).float()
    given = float8.decode(*float8.quantize(x, case.block))
    expected = given.double() @ float8.decode(numbers, scales).double().t()
    expected = expected if bias is None else expected + bias.double()
    # Of each row by itself: their sizes differ by six orders of magnitude. Tensor cores add 8-bit products in 14 bits.
    deviation = ((got.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()
    assert deviation <= (1e-6 if dtype == torch.float32 else 4e-3), f"deviates by {deviation:.1e}"
