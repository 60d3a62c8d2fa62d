"""8-bit floats: what vectors are rounded to."""

from __future__ import annotations

import pytest
import torch

from microturn.model.gpu import float8, float8_kernel
from support import projections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 128])
def test_numbers_are_off_by_a_sixteenth_at_most_or_by_the_smallest_step(dtype: torch.dtype, block: int) -> None:
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).mul(1e-4).to(dtype)
    numbers, scales = float8.quantize(x, block)
    assert (numbers.dtype, list(scales.shape)) == (torch.float8_e4m3fn, [7, 128 // block])
    difference = (float8.decode(numbers, scales) - x.float()).abs().view(7, -1, block)
    assert (difference <= x.float().abs().view(7, -1, block) / 16 + scales[..., None] * 2**-10).all()
    assert (numbers.float().abs().view(7, -1, block).amax(-1) == float8.LARGEST).all()


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    numbers, scales = float8.quantize(x, 32)
    for row in range(9):
        alone, scales_alone = float8.quantize(x[row : row + 1], 32)
        assert torch.equal(alone.float()[0], numbers.float()[row])
        assert torch.equal(scales_alone[0], scales[row])


def test_zeros_stay_and_what_is_no_number_is_told() -> None:
    numbers, scales = float8.quantize(torch.zeros(1, 16), 16)
    assert torch.equal(float8.decode(numbers, scales), torch.zeros(1, 16))
    x = torch.ones(2, 16)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    assert not torch.isfinite(float8.decode(*float8.quantize(x, 16))[:, 3]).any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, which interprets the kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 96, 192])
def test_the_kernel_rounds_likewise_to_the_bit(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    projections.let_interpreter_round(monkeypatch)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[1] *= 1e-30
    x[2] = 0
    x[3, 7], x[4, 8] = torch.nan, -torch.inf
    for got, expected in zip(float8_kernel.quantize(x, block), float8.quantize(x, block), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.float()[:3], expected.float()[:3], rtol=0, atol=0)
    assert float8.decode(*float8_kernel.quantize(x, block))[3:, 7:9].isnan().any(1).all()


def test_numbers_beyond_the_largest_become_it() -> None:
    assert float8.encode(torch.full((1, 2), -1e4), torch.ones(1, 1)).float().tolist() == [[-448.0, -448.0]]
