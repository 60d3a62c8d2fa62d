"""Products with 8-bit weights: near the modules, the same to the bit in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.int8_products import TILE_ROWS
from support.rounded import RoundedLinear

SIDES = pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (48, 311), (30, 7)])


NUM_ROWS = 12 * TILE_ROWS


def module(num_in: int, num_out: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)


def product(linear: Int8Linear, x: Tensor) -> Tensor:
    return linear(x, torch.full((len(x), linear.num_out), float("nan")))


@SIDES
def test_a_row_has_the_same_bits_in_any_company(num_in: int, num_out: int) -> None:
    """Whole tiles and part ones."""
    linear = Int8Linear.of(module(num_in, num_out))
    x = torch.randn(NUM_ROWS, num_in) * torch.logspace(-3, 3, NUM_ROWS)[:, None]
    alone = torch.cat([product(linear, row[None]) for row in x])
    assert torch.equal(product(linear, x), alone)
    for num_rows in (2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 33):
        assert torch.equal(product(linear, x[-num_rows:].contiguous()), alone[-num_rows:])


@SIDES
@pytest.mark.parametrize("num_rows", [0, 1, 5, 41])
def test_the_product_is_that_of_rounded_weights_and_inputs(num_in: int, num_out: int, num_rows: int) -> None:
    given = module(num_in, num_out, bias=True)
    x = torch.randn(num_rows, num_in)
    got = product(Int8Linear.of(given), x)
    assert torch.equal(got, RoundedLinear(given)(x))
    # Not in parts of the product itself, of which few elements can all be small.
    typical = x.norm() * given.weight.norm() / num_in**0.5
    assert (got - given(x)).norm() <= 0.02 * typical


def test_each_row_of_a_weight_has_a_scale_of_its_own() -> None:
    given = module(64, 8)
    given.weight *= torch.logspace(-4, 4, 8)[:, None]
    x = torch.randn(50, 64)
    expected = given(x)
    assert ((product(Int8Linear.of(given), x) - expected).norm(dim=0) < 0.02 * expected.norm(dim=0)).all()


@pytest.mark.parametrize("num_rows", [5, 37])
def test_a_nan_stays_in_its_row_and_is_not_lost(num_rows: int) -> None:
    x = torch.ones(num_rows, 64)
    x[2, 7] = float("nan")
    got = product(Int8Linear.of(module(64, 12)), x)
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4]].isfinite().all()


def test_several_modules_as_one_leave_them_as_they_are() -> None:
    modules = [module(32, 8), module(32, 4, bias=True), module(32, 5)]
    before = [(given.weight.data_ptr(), given.weight.clone()) for given in modules]
    linear = Int8Linear.fused(modules)
    x = torch.randn(3, 32)
    torch.testing.assert_close(product(linear, x), torch.cat([given(x) for given in modules], -1), atol=0.04, rtol=0)
    assert all(
        given.weight.data_ptr() == at and torch.equal(given.weight, weight)
        for given, (at, weight) in zip(modules, before, strict=True)
    )


def test_weights_take_a_quarter_of_the_memory() -> None:
    given = module(576, 960)
    assert Int8Linear.of(given).num_bytes == given.weight.numel() + 4 * 960
