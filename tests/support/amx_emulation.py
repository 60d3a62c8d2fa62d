"""A pytest plugin: the instructions of AMX on CPUs that have none, as functions of numpy.

Kernels that are compiled with it call these functions: they need a kernel cache of their own (NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numpy.typing import NDArray

from microturn.model.cpu import amx_products

_MOST_ROWS, _MOST_BYTES = 16, 64


class Registers:
    """The tile registers of a thread: none before `ldtilecfg`, which sets them to zeros."""

    def __init__(self) -> None:
        self.tiles: dict[int, NDArray[np.uint8]] = {}

    def ldtilecfg(self, address: int) -> None:
        config = _memory(address, 64)
        assert config[0] == 1, "the palette"
        widths = config[16:32].view(np.uint16)
        assert widths.max() <= _MOST_BYTES
        assert config[48:56].max() <= _MOST_ROWS
        self.tiles = {
            number: np.zeros((rows, width), np.uint8)
            for number, (rows, width) in enumerate(zip(config[48:56], widths, strict=True))
            if rows
        }

    def tilerelease(self) -> None:
        self.tiles = {}

    def tilezero(self, number: int) -> None:
        self.tiles[number][:] = 0

    def tileloadd64(self, number: int, address: int, distance: int) -> None:
        for index, row in enumerate(self.tiles[number]):
            row[:] = _memory(address + index * distance, len(row))

    def tilestored64(self, number: int, address: int, distance: int) -> None:
        for index, row in enumerate(self.tiles[number]):
            _memory(address + index * distance, len(row))[:] = row

    def tdpbsud(self, sums: int, signed: int, unsigned: int) -> None:
        """Four neighbours of a row of the first times the four of each column of the second."""
        quads = self.tiles[unsigned].reshape(len(self.tiles[unsigned]), -1, 4).transpose(0, 2, 1)
        factors = quads.reshape(-1, quads.shape[2]).astype(np.int32)
        self.tiles[sums].view(np.int32)[:] += self.tiles[signed].view(np.int8).astype(np.int32) @ factors


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


# By thread: those that run kernels are not Python's, and keep nothing of Python from call to call.
_registers: defaultdict[int, Registers] = defaultdict(Registers)

_BYTE, _ADDRESS = ctypes.c_uint8, ctypes.c_size_t
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ldtilecfg": (_ADDRESS,),
    "tilerelease": (),
    "tilezero": (_BYTE,),
    "tileloadd64": (_BYTE, _ADDRESS, _ADDRESS),
    "tilestored64": (_BYTE, _ADDRESS, _ADDRESS),
    "tdpbsud": (_BYTE, _BYTE, _BYTE),
}
_PREFIX = "emulated_"


def _function(name: str) -> Callable[..., None]:
    def run(*args: int) -> None:
        getattr(_registers[threading.get_ident()], name)(*args)

    return run


_functions = {name: ctypes.CFUNCTYPE(None, *kinds)(_function(name)) for name, kinds in _ARGUMENTS.items()}
for _name, _made in _functions.items():
    binding.add_symbol(_PREFIX + _name, ctypes.cast(_made, ctypes.c_void_p).value)


def _call(b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, _PREFIX + name), args)


amx_products._call = _call
amx_products.is_available = lambda: True
