"""Writes new keys and values into pages of each type, bitwise as `LayerPages.put`.

The type is known when code is generated: there are no branches on it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from microturn.kv.quantization import LEAST_SCALE, MOST_STEPS
from microturn.model.cpu.vectors import Values, callable_by_kernels, loop

_FLOAT, _INT32, _INT16, _INT8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)

_MAGNITUDE = _INT32(0x7FFFFFFF)  # all bits but the sign; as integers infinity is the largest number, and NaN is larger
_INFINITY = _INT32(0x7F800000)
_BFLOAT16_NAN = _INT16(0x7FC0)


def pack() -> Any:
    """Makes ``(pages, scales, at, scale_at, floats, first, head_dim, terms, stride)``: writes one vector of a head.

    Element d of ``floats[first : first + head_dim]`` goes to ``pages[at + d // terms * stride + d % terms]``. `pages`
    are as in `attention_panels.Keys`; int8 has its scale written to ``scales[scale_at]``.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, scales: ir.Value, *args: ir.Value) -> None:
        at, scale_at, floats, first, head_dim, terms, stride = args
        kind = pages.type.pointee
        start = b.gep(floats, [first])
        if kind == _INT8:
            scale = _scale(b, start, head_dim)
            b.store(scale, b.gep(scales, [scale_at]))

        def pack_lane(lane: ir.Value, _: Values) -> Values:
            place = b.add(at, b.mul(lane, stride))

            def pack_element(term: ir.Value, _: Values) -> Values:
                x = b.load(b.gep(start, [b.add(b.mul(lane, terms), term)]))
                if kind == _INT8:
                    x = _to_int8(b, b.fdiv(x, scale))
                elif kind == _INT16:
                    x = _to_bfloat16(b, x)
                b.store(x, b.gep(pages, [b.add(place, term)]))
                return []

            loop(b, terms, [], pack_element)
            return []

        loop(b, b.udiv(head_dim, terms), [], pack_lane)

    return callable_by_kernels(emit)


def _scale(b: ir.IRBuilder, start: ir.Value, head_dim: ir.Value) -> ir.Value:
    """The scale of a vector, as in `kv.quantization`."""

    def raise_largest(d: ir.Value, largest: Values) -> Values:
        magnitude = b.and_(b.bitcast(b.load(b.gep(start, [d])), _INT32), _MAGNITUDE)
        return [b.select(b.icmp_unsigned(">", magnitude, largest[0]), magnitude, largest[0])]

    (largest,) = loop(b, head_dim, [_INT32(0)], raise_largest)
    scale = b.fdiv(b.bitcast(largest, _FLOAT), _FLOAT(MOST_STEPS))
    return b.select(b.fcmp_ordered("<", scale, _FLOAT(LEAST_SCALE)), _FLOAT(LEAST_SCALE), scale)


def _to_int8(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest integer, ties to even; 0 for NaN."""
    nearest = cgutils.get_or_insert_function(b.module, ir.FunctionType(_FLOAT, [_FLOAT]), "llvm.rint.f32")
    convert = cgutils.get_or_insert_function(b.module, ir.FunctionType(_INT8, [_FLOAT]), "llvm.fptosi.sat.i8.f32")
    return b.call(convert, [b.call(nearest, [x])])


def _to_bfloat16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of the nearest bfloat16, ties to even."""
    bits = b.bitcast(x, _INT32)
    is_odd = b.and_(b.lshr(bits, _INT32(16)), _INT32(1))
    rounded = b.trunc(b.lshr(b.add(b.add(bits, _INT32(0x7FFF)), is_odd), _INT32(16)), _INT16)
    return b.select(b.icmp_unsigned(">", b.and_(bits, _MAGNITUDE), _INFINITY), _BFLOAT16_NAN, rounded)
