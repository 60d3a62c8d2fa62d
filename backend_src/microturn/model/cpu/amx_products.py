"""The inner loop of products with 8-bit weights on CPUs with AMX: sixteen rows by two panels by 64 inputs at a time.

A CPU with Intel's Advanced Matrix Extensions has eight *tile registers* of 16 rows of 64 bytes, and an instruction that
multiplies two of them and adds to a third: bytes, and sums of 32 bits (Intel 64 and IA-32 Architectures Software
Developer's Manual, volume 1, chapter 18). A step of a panel, as it lies there, is one tile: a row of it has four inputs
of each of its 16 outputs. The sums are those of `int8_products`, and results the same to the bit.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from microturn.model.cpu.int8_products import PANEL, PANELS_AT_ONCE, STEP, load, store_first
from microturn.model.cpu.integer_products import HAS_VNNI
from microturn.model.cpu.vectors import CPU_FEATURES, INT, L2, Values, broadcast, callable_by_kernels, fetch, loop

# Rows of inputs that are multiplied at once.
TILE_ROWS = 16

# A row of a tile register: 16 sums, or four inputs of 16 outputs, or 64 inputs of a row.
_ROW_BYTES = 64
_TILE_BYTES = TILE_ROWS * _ROW_BYTES

# Weights are fetched so many bytes ahead.
_AHEAD = 4096

# Use of the registers: sums and weights of each panel, and inputs.
_SUMS = (0, 1)
_WEIGHTS = (2, 3)
_INPUTS = 4

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64

_BYTE, _SHORT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.FloatType()
_SUM_LANES, _FLOAT_LANES = ir.VectorType(ir.IntType(32), PANEL), ir.VectorType(_FLOAT, PANEL)
_POINTER = _BYTE.as_pointer()


@functools.cache
def is_available() -> bool:
    """Whether this process may use tile registers. Linux grants them on request: they enlarge a thread's state."""
    if not (HAS_VNNI and {"+amx-tile", "+amx-int8"} <= CPU_FEATURES):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def configure() -> Any:
    """Makes ``()``, which a thread calls before `tile`."""

    def emit(b: ir.IRBuilder) -> None:
        kind = ir.ArrayType(_BYTE, _ROW_BYTES)
        config = cgutils.alloca_once(b, kind)
        b.store(kind(None), config)
        start = b.bitcast(config, _POINTER)
        b.store(_BYTE(1), start)  # the palette: these eight registers
        for register in (*_SUMS, *_WEIGHTS, _INPUTS):
            b.store(_SHORT(_ROW_BYTES), b.bitcast(b.gep(start, [INT(16 + 2 * register)]), _SHORT.as_pointer()), align=1)
            b.store(_BYTE(TILE_ROWS), b.gep(start, [INT(48 + register)]))
        _call(b, "ldtilecfg", start)

    return callable_by_kernels(emit)


def release() -> Any:
    """Makes ``()``, which a thread calls behind its last `tile`: Linux need not keep its registers any more."""
    return callable_by_kernels(lambda b: _call(b, "tilerelease"))


def tile() -> Any:
    """Makes ``(x, x_scales, x_offsets, row, num_rows, weight, weight_scales, panel, num_in, out, num_out)``.

    For so many rows, of which `row` is a multiple of TILE_ROWS, it sets the columns of out that PANELS_AT_ONCE panels
    have, as far as there are so many, to ``(sum + x_offset) * weight_scale * x_scale``, multiplied in this order.
    Arrays are those of `amx_kernels.multiply`, and `num_in` is the padded width.
    """

    def emit(b: ir.IRBuilder, x: ir.Value, x_scales: ir.Value, x_offsets: ir.Value, *args: ir.Value) -> None:
        row, num_rows, weight, weight_scales, panel, num_in, out, num_out = args
        panels = [b.add(panel, INT(index)) for index in range(PANELS_AT_ONCE)]
        starts = [b.gep(weight, [b.mul(number, b.mul(num_in, INT(PANEL)))]) for number in panels]
        inputs = b.gep(x, [b.mul(row, num_in)])
        for register in _SUMS:
            _call(b, "tilezero", _BYTE(register))

        def add_step(number: ir.Value, _: Values) -> Values:
            _load_tile(b, _INPUTS, b.gep(inputs, [b.mul(number, INT(STEP))]), num_in)
            for start, weights, sums in zip(starts, _WEIGHTS, _SUMS, strict=True):
                step = b.gep(start, [b.mul(number, INT(_TILE_BYTES))])
                for line in range(0, _TILE_BYTES, _ROW_BYTES):
                    fetch(b, b.gep(step, [INT(_AHEAD + line)]), L2)
                _load_tile(b, weights, step, INT(_ROW_BYTES))
                _call(b, "tdpbsud", _BYTE(sums), _BYTE(_INPUTS), _BYTE(weights))
            return []

        loop(b, b.udiv(num_in, INT(STEP)), [], add_step)
        stored = [_store_tile(b, register) for register in _SUMS]

        def scale_row(index: ir.Value, _: Values) -> Values:
            number, at = b.add(row, index), b.mul(index, INT(_ROW_BYTES))
            x_scale, offset = (broadcast(b, b.load(b.gep(of_row, [number])), PANEL) for of_row in (x_scales, x_offsets))
            for which, of_panel in zip(panels, stored, strict=True):
                column = b.mul(which, INT(PANEL))
                sums = b.add(load(b, of_panel, at, _SUM_LANES), offset)
                scaled = b.fmul(b.sitofp(sums, _FLOAT_LANES), load(b, weight_scales, column, _FLOAT_LANES))
                address = b.gep(out, [b.add(b.mul(number, num_out), column)])
                store_first(b, b.fmul(scaled, x_scale), address, b.sub(num_out, column))
            return []

        loop(b, num_rows, [], scale_row)

    return callable_by_kernels(emit)


def _load_tile(b: ir.IRBuilder, register: int, address: ir.Value, distance: ir.Value) -> None:
    """Loads rows that lie so many bytes apart."""
    _call(b, "tileloadd64", _BYTE(register), b.bitcast(address, _POINTER), distance)


def _store_tile(b: ir.IRBuilder, register: int) -> ir.Value:
    """Where its rows now are."""
    place = cgutils.alloca_once(b, ir.ArrayType(_BYTE, _TILE_BYTES))
    place.align = _ROW_BYTES
    address = b.bitcast(place, _POINTER)
    _call(b, "tilestored64", _BYTE(register), address, INT(_ROW_BYTES))
    return address


def _call(b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    """An instruction on tile registers, which go by their numbers."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), args)
