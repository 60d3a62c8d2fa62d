"""Several linear modules as one product: the same numbers, one memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microturn.model.cpu.linear import Linear


@pytest.fixture
def modules() -> list[nn.Linear]:
    return [nn.Linear(32, 8, bias=False), nn.Linear(32, 4), nn.Linear(32, 4, bias=False)]


def product(linear: Linear, x: Tensor) -> Tensor:
    return linear(x, torch.full((len(x), linear.num_out), float("nan")))


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [0, 1, 4, 25])
def test_the_product_of_all_modules(modules: list[nn.Linear], num_rows: int) -> None:
    x = torch.randn(num_rows, 32)
    expected = torch.cat([module(x) for module in modules], dim=-1)
    torch.testing.assert_close(product(Linear.fused(modules), x), expected)
    torch.testing.assert_close(product(Linear.of(modules[1]), x), expected[:, 8:12])


@torch.inference_mode()
def test_sides_that_do_not_fit_the_kernel() -> None:
    module = nn.Linear(30, 7)
    x = torch.randn(3, 30)
    torch.testing.assert_close(product(Linear.of(module), x), module(x))
    assert not Linear.of(module).is_native


@torch.inference_mode()
@pytest.mark.parametrize("width", [66, 63, 1001])
def test_a_row_has_the_same_bits_wherever_it_lies(width: int) -> None:
    linear, x = Linear.of(nn.Linear(width, 7)), torch.randn(40, width)
    alone = torch.cat([product(linear, row[None].clone()) for row in x])
    assert torch.equal(product(linear, x), alone)


@torch.inference_mode()
@pytest.mark.parametrize("width", [32, 30])
def test_weights_as_they_are_stored_give_the_bits_of_float32(width: int) -> None:
    modules = [nn.Linear(width, 8), nn.Linear(width, 4)]
    x = torch.randn(5, width)
    for module in modules:
        module.weight.data = module.weight.bfloat16()
    got = product(Linear.fused(modules), x)
    assert Linear.fused(modules).num_bytes == 2 * 12 * width
    for module in modules:
        module.weight.data = module.weight.float()
    assert torch.equal(got, product(Linear.fused(modules), x))


def test_the_weights_are_the_modules_own(modules: list[nn.Linear]) -> None:
    linear = Linear.fused(modules)
    assert [weight.ctypes.data for weight in linear.weights] == [module.weight.data_ptr() for module in modules]
