"""Tests of kv_quantization."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.quantization import dequantize, quantize


def vectors(*shape: int) -> torch.Tensor:
    """Normal numbers of every size, each vector of its own."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator) * torch.logspace(-30, 30, shape[0])[:, None, None]


def test_nothing_is_off_by_more_than_half_a_scale_which_is_a_127th_of_the_largest() -> None:
    x = vectors(61, 3, 64)
    steps, scales = quantize(x)
    assert steps.dtype == torch.int8
    assert steps.shape == x.shape
    assert scales.shape == (61, 3)
    torch.testing.assert_close(scales, x.abs().amax(-1) / 127)
    assert ((dequantize(steps, scales) - x).abs() <= 0.5001 * scales[..., None]).all()


def test_the_largest_element_is_kept_on_either_side() -> None:
    x = torch.tensor([[-3.0, 1.0, 2.99], [0.25, 5.0, -4.9]])
    steps, scales = quantize(x)
    assert steps.tolist() == [[-127, 42, 127], [6, 127, -124]]
    torch.testing.assert_close(dequantize(steps, scales).abs().amax(-1), torch.tensor([3.0, 5.0]))


@pytest.mark.parametrize("tiny", [0.0, 1e-45, -1e-40, 1e-38])
def test_zeros_and_what_is_nearly_zero_come_back_as_nearly_zero(tiny: float) -> None:
    steps, scales = quantize(torch.full((2, 5), tiny))
    assert torch.isfinite(scales).all()
    assert (dequantize(steps, scales) - tiny).abs().max() <= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("largest", [3e38, -3e38])
def test_very_large_floats_do_not_overflow(largest: float) -> None:
    steps, scales = quantize(torch.tensor([[largest, 0.0]]))
    assert steps.abs().tolist() == [[127, 0]]
    assert torch.isfinite(dequantize(steps, scales)).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_vector_that_is_broken_stays_broken_and_its_neighbours_whole(broken: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = broken
    back = dequantize(*quantize(x))
    assert torch.equal(back[[0, 2]], x[[0, 2]])
    assert not torch.isfinite(back[1]).any()


def test_a_vector_s_code_does_not_depend_on_its_company() -> None:
    x = vectors(20, 2, 7)
    steps, scales = quantize(x)
    for at in range(len(x)):
        alone_steps, alone_scales = quantize(x[at : at + 1])
        assert torch.equal(alone_steps[0], steps[at])
        assert torch.equal(alone_scales[0], scales[at])
