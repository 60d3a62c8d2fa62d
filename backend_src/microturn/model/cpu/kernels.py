"""Small kernels of a decoder layer.

Floats are float32, and arrays contiguous: others would be compiled again, to slower code. They run on one thread: in a
decode step they take less time than starting a parallel region, and in a long append they are negligible.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu.angles import Angles, rotate
from microturn.model.cpu.kernel_cache import kernel

# Allows sums in any order, but keeps infinities and NaN.
_FAST = {"contract", "reassoc", "nsz", "arcp", "afn"}

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]


@numba.njit(fastmath=_FAST, nogil=True)
def _normalize(x: _Array, gain: _Array, eps: np.float32, out: _Array) -> None:
    total = np.float32(0.0)
    for d in range(x.shape[0]):
        total += x[d] * x[d]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for d in range(x.shape[0]):
        out[d] = x[d] * scale * gain[d]


@kernel(fastmath=_FAST)
def rms_norm(x: _Array, gain: _Array, eps: np.float32, out: _Array) -> None:
    """Root mean square norm (Zhang and Sennrich, 2019) of each row: x and out [rows, width], gain [width]."""
    for row in range(x.shape[0]):
        _normalize(x[row], gain, eps, out[row])


@numba.njit(fastmath=_FAST, nogil=True)
def _normalize_heads(heads: _Array, gain: _Array, eps: np.float32) -> None:
    """Norms heads [heads, head_dim] in place: each, or all as one vector, as long as the gain; none if it is empty."""
    if gain.shape[0] == heads.shape[1]:
        for head in range(heads.shape[0]):
            _normalize(heads[head], gain, eps, heads[head])
    elif gain.shape[0] > 0:
        whole = heads.reshape(heads.size)
        _normalize(whole, gain, eps, whole)


@kernel(fastmath=_FAST)
def split_heads(
    qkv: _Array,
    q_gain: _Array,
    k_gain: _Array,
    eps: np.float32,
    angles: Angles,
    q: _Array,
    k: _Array,
    v: _Array,
) -> None:
    """Splits the fused projection into heads; queries and keys are normed, where there are gains, and rotated.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim], the query heads first; overwritten where it is normed.
        q_gain: [head_dim], or [heads * head_dim] for a norm of all heads as one vector, or empty for heads that are
            not normed; `k_gain` likewise.
        eps: of the norms.
        angles: of the tokens.
        q: [at least tokens, heads, head_dim], written.
        k: [tokens, kv_heads, head_dim], written; `v` likewise.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    first_value = num_heads + num_kv_heads
    for token in range(qkv.shape[0]):
        queries, keys = qkv[token, :num_heads], qkv[token, num_heads:first_value]
        _normalize_heads(queries, q_gain, eps)
        _normalize_heads(keys, k_gain, eps)
        rotate(queries, angles, token, q[token])
        rotate(keys, angles, token, k[token])
        v[token] = qkv[token, first_value:]


@numba.njit(nogil=True)
def turn_back(q: _Array, num_tokens: int, moved: _Array, back: Angles) -> None:
    """Rotates the queries of rows with moved sinks once more.

    Args:
        q: [tokens and moved ones, heads, head_dim]; those behind the tokens' own are written.
        num_tokens: of the pass.
        moved: int64 [n], which tokens.
        back: the angles of these.
    """
    for index in range(moved.shape[0]):
        rotate(q[moved[index]], back, index, q[num_tokens + index])
