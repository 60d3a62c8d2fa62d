"""Gates against torch's own activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from microturn.model.cpu import gates
from microturn.model.cpu.vectors import LANES

ACTIVATIONS = pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])


def gated(activation: nn.Module, gate_up: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    factors = gates.coefficients(activation, width)
    assert factors is not None
    out = torch.full((len(gate_up), width), 7.0)
    gates.multiply(gate_up.numpy(), factors, out.numpy())
    return out


@ACTIVATIONS
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
@pytest.mark.parametrize("width", [LANES, LANES + 1, 80, 1536])
def test_the_gate_is_the_activation_times_what_it_multiplies(name: str, num_rows: int, width: int) -> None:
    gate_up = torch.randn(num_rows, 2 * width, dtype=torch.float64) * 6
    gate, up = gate_up.chunk(2, dim=-1)
    got = gated(ACT2FN[name], gate_up.float())
    torch.testing.assert_close(got.double(), ACT2FN[name](gate) * up, atol=1e-6, rtol=3e-6)


@ACTIVATIONS
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    gate_up = torch.randn(40, 2 * 83)
    alone = torch.cat([gated(ACT2FN[name], row[None]) for row in gate_up])
    assert torch.equal(gated(ACT2FN[name], gate_up), alone)


@ACTIVATIONS
def test_large_gates_are_open_or_shut_and_what_is_not_finite_stays_so(name: str) -> None:
    gate = torch.tensor([1e4, -1e4, 300.0, -300.0, 0.0, -0.0, float("inf"), float("nan")]).repeat(LANES // 8)
    got = gated(ACT2FN[name], torch.cat((gate, torch.full_like(gate, 2.0)))[None])[0]
    assert torch.equal(got.isfinite(), gate.isfinite())
    torch.testing.assert_close(got[gate.isfinite()], ACT2FN[name](gate[gate.isfinite()]) * 2)


def test_other_activations_and_narrow_blocks_are_left_to_torch() -> None:
    assert gates.coefficients(ACT2FN["gelu"], 80) is None
    assert gates.coefficients(ACT2FN["relu2"], 80) is None
    assert gates.coefficients(ACT2FN["silu"], LANES - 1) is None
