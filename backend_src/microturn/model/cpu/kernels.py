"""Small kernels of a decoder layer.

Floats are float32, and arrays contiguous: others would be compiled again, to slower code. They run on one thread: in a
decode step they take less time than starting a parallel region, and in a long append they are negligible.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from microturn.model.cpu.angles import Angles, rotate
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    choose,
    fold,
    load_first,
    load_vector,
    loop,
    loop_any,
    multiply_add,
    splat,
    square_root,
    store_vector,
)

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]


def _normalize_vector() -> Any:
    """Makes ``(x, gain, eps, out, width)``: a root mean square norm of a vector, into out, which may be x.

    The order of the sum is written out. Where Numba and LLVM may choose it (``reassoc``), they choose another one when
    a kernel is compiled beside those that call it than when it is loaded from the cache: a first start on a machine
    computed other bits than the next.
    """

    def emit(b: ir.IRBuilder, x: ir.Value, gain: ir.Value, eps: ir.Value, out: ir.Value, width: ir.Value) -> None:
        num_vectors, num_last = b.udiv(width, INT(LANES)), b.urem(width, INT(LANES))
        first_last = b.sub(width, num_last)

        def start(array: ir.Value, index: ir.Value) -> ir.Value:
            return b.gep(array, [b.mul(index, INT(LANES))])

        def add_squares(index: ir.Value, sums: Values) -> Values:
            some = load_vector(b, start(x, index), LANES)
            return [multiply_add(b, some, some, sums[0])]

        has_vectors = b.icmp_signed(">", num_vectors, INT(0))
        (sums,) = choose(b, has_vectors, [splat(0.0)], lambda none: loop(b, num_vectors, none, add_squares))
        last = load_first(b, b.gep(x, [first_last]), LANES, num_last)
        total = fold(b, multiply_add(b, last, last, sums), 1, b.fadd)
        mean = b.fdiv(total, broadcast(b, b.sitofp(width, ir.FloatType())))
        scale = b.fdiv(splat(1.0), square_root(b, b.fadd(mean, broadcast(b, eps))))

        def write(index: ir.Value, _: Values) -> Values:
            some, factors = (load_vector(b, start(array, index), LANES) for array in (x, gain))
            store_vector(b, b.fmul(b.fmul(some, scale), factors), start(out, index))
            return []

        def write_one(index: ir.Value, _: Values) -> Values:
            element, factor, to = (b.gep(array, [b.add(first_last, index)]) for array in (x, gain, out))
            of_all = b.extract_element(scale, ir.IntType(32)(0))
            b.store(b.fmul(b.fmul(b.load(element), of_all), b.load(factor)), to)
            return []

        loop_any(b, num_vectors, write)
        loop_any(b, num_last, write_one)

    return callable_by_kernels(emit)


_normalize = _normalize_vector()


@kernel()
def rms_norm(x: _Array, gain: _Array, eps: np.float32, out: _Array) -> None:
    """Root mean square norm (Zhang and Sennrich, 2019) of each row: x and out [rows, width], gain [width]."""
    for row in range(x.shape[0]):
        _normalize(x[row], gain, eps, out[row], x.shape[1])


@numba.njit(nogil=True)
def _normalize_heads(heads: _Array, gain: _Array, eps: np.float32) -> None:
    """Norms heads [heads, head_dim] in place: each, or all as one vector, as long as the gain; none if it is empty."""
    if gain.shape[0] == heads.shape[1]:
        for head in range(heads.shape[0]):
            _normalize(heads[head], gain, eps, heads[head], heads.shape[1])
    elif gain.shape[0] > 0:
        _normalize(heads, gain, eps, heads, heads.size)


@kernel()
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
        for head in range(num_kv_heads):  # written out: a slice takes Numba three seconds to compile
            for d in range(v.shape[2]):
                v[token, head, d] = qkv[token, first_value + head, d]


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
