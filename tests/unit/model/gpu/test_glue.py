"""What lies between products and attention: against torch's and transformers' own, and compiled as it stands."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm import modeling_glm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3 import modeling_phi3

from microturn.model.gpu.glue import Glue, Norm, Projection, add_and_norm, gate, rms_norm, split_heads

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _norm(width: int) -> Norm:
    return torch.randn(width), 1e-5


def test_a_norm_is_transformers() -> None:
    gain, eps = _norm(48)
    module = LlamaRMSNorm(48, eps)
    module.weight.data = gain
    x = torch.randn(5, 48)
    torch.testing.assert_close(rms_norm(x, (gain, eps)), module(x))


def test_without_a_next_norm_the_sum_is_given_twice() -> None:
    hidden, block = torch.randn(5, 48), torch.randn(5, 48)
    for part in add_and_norm(hidden, block, None, 1.0, None):
        torch.testing.assert_close(part, hidden + block)


@pytest.mark.parametrize("factor", [1.0, 0.22])
@pytest.mark.parametrize("has_norm", [True, False])
def test_a_block_is_added_normed_where_it_is_to_be(has_norm: bool, factor: float) -> None:
    hidden, block = torch.randn(5, 48), torch.randn(5, 48)
    block_norm, next_norm = _norm(48) if has_norm else None, _norm(48)
    expected = hidden + factor * (block if block_norm is None else rms_norm(block, block_norm))
    added, normed = add_and_norm(hidden, block, block_norm, factor, next_norm)
    torch.testing.assert_close(added, expected)
    torch.testing.assert_close(normed, rms_norm(expected, next_norm))


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("num_pairs", [HEAD_DIM // 2, 3, 0])
@pytest.mark.parametrize("norms", ["of each", "of all", None])
def test_heads_are_split_normed_and_rotated_as_in_transformers(
    norms: str | None, num_pairs: int, is_interleaved: bool
) -> None:
    qkv, angles = torch.randn(5, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.randn(5, num_pairs)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    q_norm = k_norm = None
    if norms == "of each":
        q_norm, k_norm = _norm(HEAD_DIM), _norm(HEAD_DIM)
        q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)
    elif norms == "of all":
        q_norm, k_norm = _norm(HEADS * HEAD_DIM), _norm(KV_HEADS * HEAD_DIM)
        q, k = (rms_norm(x.flatten(1), of_all).view(x.shape) for x, of_all in ((q, q_norm), (k, k_norm)))
    # Another family's function for neighbours: both take cosines and sines of the first half of a head twice.
    rotate = modeling_glm.apply_rotary_pos_emb if is_interleaved else modeling_phi3.apply_rotary_pos_emb
    doubled = angles.repeat(1, 2)
    rotated = rotate(q.transpose(0, 1), k.transpose(0, 1), doubled, doubled, 0)
    expected = [x.transpose(0, 1) for x in rotated]
    got = split_heads(Projection(qkv, q_norm, k_norm, (angles, angles, is_interleaved), HEADS, KV_HEADS))
    for part, of in zip(got, (*expected, v), strict=True):
        torch.testing.assert_close(part, of)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler uses what torch deprecates
def test_torch_compiles_them_for_any_number_of_tokens() -> None:
    plain, compiled = Glue(), Glue.compiled()
    next_norm, head_norm = _norm(48), _norm(HEAD_DIM)
    for num_tokens in (7, 1, 3):
        hidden, block = torch.randn(2, num_tokens, 48).bfloat16()
        qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
        angles = torch.randn(2, num_tokens, HEAD_DIM // 4)
        gate_up = torch.randn(num_tokens, 40).bfloat16()
        given = (hidden, block, qkv, angles, gate_up, next_norm, head_norm)
        for got, expected in zip(_results(compiled, *given), _results(plain, *given), strict=True):
            torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def _results(
    glue: Glue, hidden: Tensor, block: Tensor, qkv: Tensor, angles: Tensor, gate_up: Tensor, norm: Norm, head_norm: Norm
) -> list[Tensor]:
    return [
        glue.rms_norm(hidden, norm),
        *glue.add_and_norm(hidden, block, None, 1.0, norm),
        *glue.split_heads(Projection(qkv, head_norm, head_norm, (*angles, False), HEADS, KV_HEADS)),
        *glue.split_heads(Projection(qkv, None, None, (*angles, True), HEADS, KV_HEADS)),
        glue.gate(gate_up, nn.SiLU()),
    ]


def test_the_gate_is_activated_and_multiplies() -> None:
    gate_up = torch.randn(3, 40)
    torch.testing.assert_close(gate(gate_up, nn.SiLU()), nn.functional.silu(gate_up[:, :20]) * gate_up[:, 20:])
