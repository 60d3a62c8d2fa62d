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
    return linear(x, torch.full((len(x), len(linear.weight)), float("nan")))


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


def test_modules_go_on_over_the_same_memory(modules: list[nn.Linear]) -> None:
    before = [module.weight.detach().clone() for module in modules]
    linear = Linear.fused(modules)
    first = 0
    for module, weight in zip(modules, before, strict=True):
        assert torch.equal(module.weight, weight)
        assert module.weight.data_ptr() == linear.weight[first].data_ptr()
        first += len(weight)
