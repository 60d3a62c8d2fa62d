"""Writes new keys and values into pages of each type, bitwise as `LayerPages.put` but for the bits of a NaN:
keys for int8 are given rotated.

The type is known when code is generated: there are no branches on it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from microturn.kv.quantization import MOST_STEPS
from microturn.model.cpu.attention_operands import operands_of
from microturn.model.cpu.rounding import scale_of
from microturn.model.cpu.vectors import (
    INT,
    Values,
    broadcast,
    callable_by_kernels,
    load_vector,
    loop_any,
    store_vector,
)

_FLOAT, _INT32, _INT16, _INT8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)

_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign; as integers infinity is the largest number, and NaN is larger
_INFINITY = 0x7F800000
_BFLOAT16_NAN = 0x7FC0

# So many elements are converted at once.
_MANY = 8


def pack(*, together: bool) -> Any:
    """Makes ``(pages, scales, at, scale_at, floats, first, head_dim, stride)``: writes one vector of a head.

    Element d of ``floats[first : first + head_dim]`` goes to ``pages[at + d * stride]``; or `together`, as many as lie
    together in a panel go there, those of lane d. `pages` are as in `attention_panels.Block`; int8 has its scale
    written to ``scales[scale_at]``.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, scales: ir.Value, *args: ir.Value) -> None:
        at, scale_at, floats, first, head_dim, stride = args
        kind = pages.type.pointee
        start = b.gep(floats, [first])
        few = operands_of(pages).page_terms
        at_once = few if together else 1
        if kind == _INT8:
            scale = b.extract_element(scale_of(b, start, head_dim, _FLOAT(MOST_STEPS)), _INT32(0))
            b.store(scale, b.gep(scales, [scale_at]))

        def pack_elements(d: ir.Value, count: int) -> None:
            x = load_vector(b, b.gep(start, [d]), count)
            if kind == _INT8:
                x = _to_int8(b, b.fdiv(x, broadcast(b, scale, count)))
            elif kind == _INT16:
                x = _to_bfloat16(b, x)
            for number in range(0, count, at_once):
                lane = b.add(b.udiv(d, INT(at_once)), INT(number // at_once))
                part = ir.VectorType(_INT32, at_once)(list(range(number, number + at_once)))
                part = b.shuffle_vector(x, x.type(ir.Undefined), part)
                store_vector(b, part, b.gep(pages, [b.add(at, b.mul(lane, stride))]))

        def pack_many(index: ir.Value, _: Values) -> Values:
            pack_elements(b.mul(index, INT(_MANY)), _MANY)
            return []

        def pack_few(index: ir.Value, _: Values) -> Values:
            pack_elements(b.add(b.sub(head_dim, b.urem(head_dim, INT(_MANY))), b.mul(index, INT(few))), few)
            return []

        loop_any(b, b.udiv(head_dim, INT(_MANY)), pack_many)
        loop_any(b, b.udiv(b.urem(head_dim, INT(_MANY)), INT(few)), pack_few)

    return callable_by_kernels(emit)


def _to_int8(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest integers, ties to even; 0 for NaN."""
    count = x.type.count
    floats, bytes_ = ir.VectorType(_FLOAT, count), ir.VectorType(_INT8, count)
    nearest = cgutils.get_or_insert_function(b.module, ir.FunctionType(floats, [floats]), f"llvm.rint.v{count}f32")
    name = f"llvm.fptosi.sat.v{count}i8.v{count}f32"
    convert = cgutils.get_or_insert_function(b.module, ir.FunctionType(bytes_, [floats]), name)
    return b.call(convert, [b.call(nearest, [x])])


def _to_bfloat16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of the nearest bfloat16s, ties to even."""
    count = x.type.count
    wide, half = ir.VectorType(_INT32, count), ir.VectorType(_INT16, count)

    def of(value: int) -> ir.Constant:
        return wide([value] * count)

    bits = b.bitcast(x, wide)
    is_odd = b.and_(b.lshr(bits, of(16)), of(1))
    rounded = b.trunc(b.lshr(b.add(b.add(bits, of(0x7FFF)), is_odd), of(16)), half)
    is_nan = b.icmp_unsigned(">", b.and_(bits, of(_MAGNITUDE)), of(_INFINITY))
    return b.select(is_nan, half([_BFLOAT16_NAN] * count), rounded)
