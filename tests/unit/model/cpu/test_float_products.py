"""The product for few rows against torch's: whole and part tiles, short and long rows of the weight, all its types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from microturn.model.cpu import float_products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("num_out", "width"), [(4, 16), (13, 48), (960, 576), (8, 8192)])
def test_the_product_is_torch_s(dtype: torch.dtype, num_rows: int, num_out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(num_out, width, generator=generator).to(dtype)
    out = torch.full((num_rows, num_out), float("nan"))
    float_products.multiply(x.numpy(), float_products.as_array(weight), out.numpy(), 0)
    torch.testing.assert_close(out, x @ weight.float().t(), atol=1e-5 * width**0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_out", "width"), [(0, 8, 16), (1, 512, 128), (6, 13, 48)])
def test_products_of_heads_have_the_bits_of_single_ones(
    dtype: torch.dtype, num_rows: int, num_out: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(3, num_rows, width, generator=generator)
    weights = torch.randn(3, num_out, width, generator=generator).to(dtype)
    out, expected = (torch.full((3, num_rows, num_out), float("nan")) for _ in range(2))
    float_products.multiply_each(x.numpy(), float_products.as_array(weights), out.numpy())
    for head in range(3):
        float_products.multiply(x[head].numpy(), float_products.as_array(weights[head]), expected[head].numpy(), 0)
    assert not out.isnan().any()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_weight_gives_the_bits_of_the_widened_one(dtype: torch.dtype) -> None:
    weight = torch.randn(13, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, float("inf"), torch.finfo(dtype).smallest_normal / 2])
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    narrow, wide = torch.empty(5, 13), torch.empty(5, 13)
    float_products.multiply(x.numpy(), float_products.as_array(weight), narrow.numpy(), 0)
    float_products.multiply(x.numpy(), weight.float().numpy(), wide.numpy(), 0)
    assert torch.equal(narrow.view(torch.int32), wide.view(torch.int32))


def test_products_stand_side_by_side() -> None:
    x, weight = torch.ones(5, 32), torch.ones(6, 32)
    out = torch.full((5, 10), -1.0)
    float_products.multiply(x.numpy(), weight.numpy(), out.numpy(), 3)
    assert (out[:, 3:9] == 32).all()
    assert (out[:, :3] == -1).all()
    assert (out[:, 9:] == -1).all()


def test_a_nan_stays_in_its_row_and_is_not_lost() -> None:
    x = torch.ones(5, 32)
    x[2, 7] = float("nan")
    out = torch.empty(5, 8)
    float_products.multiply(x.numpy(), torch.ones(8, 32).numpy(), out.numpy(), 0)
    assert out[2].isnan().all()
    assert (out[[0, 1, 3, 4]] == 32).all()


@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        (torch.empty(8, 32), True),
        (torch.empty(6, 32), True),
        (torch.empty(3, 32), False),
        (torch.empty(8, 40), False),
        (torch.empty(8, 32, dtype=torch.bfloat16), True),
        (torch.empty(8, 32, dtype=torch.float16), True),
        (torch.empty(8, 32, dtype=torch.float64), False),
    ],
)
def test_what_fits(weight: Tensor, fits: bool) -> None:
    assert float_products.fits(weight) is fits
