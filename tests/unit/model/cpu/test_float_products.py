"""The product for few rows against torch's, over whole and part tiles, short and long rows of the weight."""

from __future__ import annotations

import pytest
import torch

from microturn.model.cpu import float_products


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("num_out", "width"), [(4, 16), (12, 48), (960, 576), (8, 8192)])
def test_the_product_is_torch_s(num_rows: int, num_out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(num_out, width, generator=generator)
    out = torch.full((num_rows, num_out), float("nan"))
    float_products.multiply(x.numpy(), weight.numpy(), out.numpy())
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-5 * width**0.5, rtol=1e-5)


def test_a_nan_stays_in_its_row_and_is_not_lost() -> None:
    x = torch.ones(5, 32)
    x[2, 7] = float("nan")
    out = torch.empty(5, 8)
    float_products.multiply(x.numpy(), torch.ones(8, 32).numpy(), out.numpy())
    assert out[2].isnan().all()
    assert (out[[0, 1, 3, 4]] == 32).all()


@pytest.mark.parametrize(("shape", "fits"), [((8, 32), True), ((6, 32), False), ((8, 40), False)])
def test_only_whole_blocks_fit(shape: tuple[int, int], fits: bool) -> None:
    assert float_products.fits(torch.empty(shape)) is fits
