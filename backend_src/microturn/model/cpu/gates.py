"""The gate of a decoder's feed-forward block: ``gate * sigmoid(f(gate)) * up``, in whole vectors.

SiLU is ``f(x) = x``. GELU as its tanh approximation (Hendrycks and Gimpel, 2016) is the same with another f, since ``(1
+ tanh(y)) / 2 = sigmoid(2 * y)``: ``f(x) = sqrt(8 / pi) * (x + 0.044715 * x**3)``. Elements are independent.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray
from torch import nn
from transformers import activations

from microturn.model.cpu.int8_kernels import FEW_ROWS
from microturn.model.cpu.int8_products import load
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    callable_by_kernels,
    exp2,
    in_all_lanes,
    loop,
    splat,
)

_Array = NDArray[Any]

_VECTOR = ir.VectorType(ir.FloatType(), LANES)

# Coefficients of x and x**3 in f, times log2(e).
_SILU = np.float32(math.log2(math.e)) * np.array([1, 0], np.float32)
_GELU_TANH = np.float32(math.log2(math.e) * math.sqrt(8 / math.pi)) * np.array([1, 0.044715], np.float32)


def coefficients(activation: nn.Module, width: int) -> NDArray[np.float32] | None:
    """Float32 [2], the `factors` of `multiply` for an activation of this width; None if it is not supported."""
    if width < LANES:
        return None
    if isinstance(activation, nn.SiLU | activations.SiLUActivation):
        return _SILU
    is_tanh = isinstance(activation, activations.GELUTanh | activations.NewGELUActivation)
    return _GELU_TANH if is_tanh else None


def _multiply_row() -> Any:
    """Makes ``(gate_up, row, coefficients, out, width)``, for one of the rows of `multiply`."""

    def emit(
        b: ir.IRBuilder, gate_up: ir.Value, row: ir.Value, factors: ir.Value, out: ir.Value, width: ir.Value
    ) -> None:
        given, results = b.gep(gate_up, [b.mul(row, b.mul(width, INT(2)))]), b.gep(out, [b.mul(row, width)])
        linear, cubic = (in_all_lanes(b, b.gep(factors, [INT(index)])) for index in range(2))
        last = b.sub(width, INT(LANES))

        def multiply(index: ir.Value, _: Values) -> Values:
            # The last vector begins early enough to be full; elements computed twice have the same result.
            at = b.mul(index, INT(LANES))
            at = b.select(b.icmp_signed("<", at, last), at, last)
            x, up = (load(b, given, place, _VECTOR) for place in (at, b.add(at, width)))
            exponent = b.fmul(x, b.fadd(linear, b.fmul(cubic, b.fmul(x, x))))
            is_positive = b.fcmp_ordered(">", exponent, splat(0.0))
            power = exp2(b, b.select(is_positive, b.fneg(exponent), exponent))
            sigmoid = b.fdiv(b.select(is_positive, splat(1.0), power), b.fadd(splat(1.0), power))
            pointer = b.bitcast(b.gep(results, [at]), _VECTOR.as_pointer())
            b.store(b.fmul(b.fmul(x, sigmoid), up), pointer, align=4)
            return []

        loop(b, b.udiv(b.add(width, INT(LANES - 1)), INT(LANES)), [], multiply)

    return callable_by_kernels(emit)


_row = _multiply_row()


@kernel(parallel=True)
def multiply(gate_up: _Array, factors: _Array, out: _Array) -> None:
    """Applies the gate to all rows.

    Args:
        gate_up: float32 [rows, 2 * width], the gate projection, then the up projection.
        factors: `coefficients`.
        out: float32 [rows, width], written.
    """
    num_rows, width = out.shape
    if num_rows <= FEW_ROWS:
        for row in range(num_rows):
            _row(gate_up, row, factors, out, width)
    else:
        for row in numba.prange(num_rows):
            _row(gate_up, row, factors, out, width)
