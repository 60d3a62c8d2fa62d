"""Each kernel against the same written out in torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError
from torch import Tensor

from microturn.model import cpu
from microturn.model.cpu import kernels
from microturn.model.cpu.angles import Angles
from microturn.model.rotary import Layout, Rotary, Turning

EPS = np.float32(1e-5)


def test_the_compiler_chooses_no_rounding() -> None:
    """It would choose by what else is compiled: neither Numba's fast math nor flags of LLVM's instructions."""
    sources = sorted(Path(cpu.__file__).parent.glob("*.py"))
    assert len(sources) > 40
    assert [path.name for path in sources if re.search(r"fastmath|flags=(?!mmap)", path.read_text())] == []


def test_an_array_that_is_not_contiguous_is_refused() -> None:
    x = np.ones((48, 3), np.float32).T
    with pytest.raises(TypingError, match="not contiguous"):
        kernels.rms_norm(x, np.ones(48, np.float32), EPS, x)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


@pytest.mark.parametrize("width", [1, 24, 576])
def test_rms_norm_of_each_row(width: int) -> None:
    x, gain = torch.randn(3, width), torch.randn(width)
    out = torch.empty_like(x)
    kernels.rms_norm(x.numpy(), gain.numpy(), EPS, out.numpy())
    expected = normed(x, gain)
    torch.testing.assert_close(out, expected)
    kernels.rms_norm(x.numpy(), gain.numpy(), EPS, x.numpy())
    torch.testing.assert_close(x, expected, msg="in place")


LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
PAIRS = pytest.mark.parametrize("num_pairs", [12, 5, 0])


@LAYOUTS
@PAIRS
@pytest.mark.parametrize("norm", ["of each", "of all", None])
def test_heads_are_taken_apart_normed_and_rotated(norm: str | None, num_pairs: int, layout: Layout) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = 5, 6, 2, 24
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    is_of_all = norm == "of all"
    q_gain, k_gain = (torch.randn(num * head_dim if is_of_all else head_dim) for num in (num_heads, num_kv_heads))
    given = torch.randn(num_tokens, num_pairs)
    angles = Angles(given.cos().numpy(), given.sin().numpy(), layout is Layout.INTERLEAVED)
    given_q, given_k, given_v = qkv.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm == "of each":
        given_q, given_k = normed(given_q, q_gain), normed(given_k, k_gain)
    elif is_of_all:
        of_both = ((given_q, q_gain), (given_k, k_gain))
        given_q, given_k = (normed(heads.flatten(1), gain).view(heads.shape) for heads, gain in of_both)

    q = torch.empty(num_tokens, num_heads, head_dim)
    k, v = torch.empty(2, num_tokens, num_kv_heads, head_dim)
    gains = (q_gain.numpy(), k_gain.numpy()) if norm else 2 * (np.empty(0, np.float32),)
    kernels.split_heads(qkv.numpy(), *gains, EPS, angles, q.numpy(), k.numpy(), v.numpy())

    torch.testing.assert_close(q, rotated(given_q, given, layout))
    torch.testing.assert_close(k, rotated(given_k, given, layout))
    assert torch.equal(v, given_v)


@LAYOUTS
@PAIRS
def test_queries_of_moved_sinks_are_rotated_as_torch_rotates_them(num_pairs: int, layout: Layout) -> None:
    num_tokens, head_dim = 5, 24
    q = torch.randn(num_tokens + 2, 3, head_dim)
    given, moved = q[:num_tokens].clone(), torch.tensor([1, 4])
    rotary = Rotary({None: torch.rand(num_pairs)}, {None: 1.0}, [Turning(None, layout if num_pairs else None)])
    rotation = rotary.rotation(0, torch.tensor([-7, -300]))
    kernels.turn_back(q.numpy(), num_tokens, moved.numpy(), Angles.of_rotation(rotation))
    torch.testing.assert_close(q[num_tokens:], rotation(given[moved]))
    assert torch.equal(q[:num_tokens], given)


def rotated(heads: Tensor, angles: Tensor, layout: Layout) -> Tensor:
    turned, rest = heads.tensor_split([2 * angles.shape[1]], dim=-1)
    first, second = (
        turned.unflatten(-1, (2, -1)).unbind(-2)
        if layout is Layout.HALVES
        else turned.unflatten(-1, (-1, 2)).unbind(-1)
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    pairs = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(pairs, dim=-1) if layout is Layout.HALVES else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat([joined, rest], dim=-1)
