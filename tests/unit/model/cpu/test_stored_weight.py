"""Tests of `StoredWeight`: what modules over a narrow weight compute, and what is copied for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from microturn.model.cpu import float_products
from microturn.model.cpu.stored_weight import StoredWeight, as_stored, products_by_torch

pytestmark = pytest.mark.usefixtures("one_thread")

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def stored(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> StoredWeight:
    return StoredWeight.of(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights that the kernel has multiplied."""
    shapes: list[tuple[int, ...]] = []
    multiply = float_products.multiply

    def counted(x: Any, weight: Any, *others: Any) -> None:
        shapes.append(weight.shape)
        multiply(x, weight, *others)

    monkeypatch.setattr(float_products, "multiply", counted)
    return shapes


@NARROW
@pytest.mark.parametrize("num_rows", [1, 5, 32, 33])
def test_a_product_is_that_of_the_widened_weight(
    dtype: torch.dtype, num_rows: int, products: list[tuple[int, ...]]
) -> None:
    weight, x, bias = stored(12, 48, dtype=dtype), inputs(1, num_rows, 48), inputs(12)
    expected = F.linear(x, as_stored(weight).float(), bias)
    torch.testing.assert_close(F.linear(x, weight, bias), expected, atol=1e-5, rtol=1e-5)
    assert products == ([(12, 48)] if num_rows <= 32 else []), "torch's product is faster for many"


@NARROW
def test_a_row_has_the_same_product_in_any_batch(dtype: torch.dtype) -> None:
    weight, x = stored(12, 48, dtype=dtype), inputs(9, 48)
    together = F.linear(x, weight)
    assert all(torch.equal(F.linear(row[None], weight)[0], result) for row, result in zip(x, together, strict=True))


def test_what_the_kernel_cannot_multiply_is_widened(products: list[tuple[int, ...]]) -> None:
    for x, weight in ((inputs(2, 40), stored(8, 40)), (inputs(2, 48), stored(3, 48))):
        torch.testing.assert_close(F.linear(x, weight), F.linear(x, as_stored(weight).float()))
    wide = inputs(2, 48).double()
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(wide, stored(8, 48))  # as with a float32 weight
    assert products == []


def test_as_a_reference_torch_multiplies(products: list[tuple[int, ...]]) -> None:
    weight, x = stored(12, 48), inputs(3, 48)
    with products_by_torch():
        assert torch.equal(F.linear(x, weight), F.linear(x, as_stored(weight).float()))
    assert products == []
    F.linear(x, weight)
    assert products == [(12, 48)]


def test_only_the_rows_of_tokens_are_widened() -> None:
    embedding = nn.Embedding(50, 32, padding_idx=3)
    embedding.weight = nn.Parameter(stored(50, 32), requires_grad=False)
    rows = embedding(torch.tensor([[4, 0, 3]]))
    assert type(rows) is Tensor
    assert torch.equal(rows, as_stored(embedding.weight)[[4, 0, 3]].float()[None])


def test_an_expert_of_a_stack_is_one_product(products: list[tuple[int, ...]]) -> None:
    stack, x = nn.Parameter(stored(4, 12, 48), requires_grad=False), inputs(3, 48)
    assert isinstance(stack[2], StoredWeight)
    torch.testing.assert_close(F.linear(x, stack[2]), x @ as_stored(stack)[2].float().t(), atol=1e-5, rtol=1e-5)
    assert products == [(12, 48)]


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product of another order": lambda weight: inputs(3, 12) @ weight,
    "a transposed product": lambda weight: inputs(3, 48) @ weight.t(),
    "several in a list": lambda weight: torch.cat([weight, weight], dim=0),
    "an argument by name": lambda weight: F.linear(input=inputs(3, 48), weight=weight),
    "a method": lambda weight: weight.to(torch.float64),
    "a sum": lambda weight: weight + 1,
}


@pytest.mark.parametrize("of", OTHERS)
def test_everything_else_sees_float32(of: str) -> None:
    weight = stored(12, 48)
    result = OTHERS[of](weight)
    assert type(result) is Tensor
    assert torch.equal(result, OTHERS[of](as_stored(weight).float()))


@NARROW
def test_it_says_where_it_is_and_what_it_takes(dtype: torch.dtype) -> None:
    plain = torch.ones(12, 48, dtype=dtype)
    weight = nn.Parameter(StoredWeight.of(plain), requires_grad=False)
    assert isinstance(weight, StoredWeight)
    assert isinstance(weight, nn.Parameter)
    assert (weight.dtype, as_stored(weight).dtype) == (torch.float32, dtype)
    assert (weight.data_ptr(), weight.nbytes) == (plain.data_ptr(), plain.nbytes)
    assert (weight.shape, len(weight), weight.dim(), weight.numel()) == ((12, 48), 12, 2, 576)
    assert not weight.is_meta
