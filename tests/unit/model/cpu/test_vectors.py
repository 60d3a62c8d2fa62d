"""Functions of a vector's lanes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from microturn.model.cpu import vectors
from microturn.model.cpu.vectors import LANES, load_vector, store_vector


def _emit_exp2(b: ir.IRBuilder, x: ir.Value, out: ir.Value) -> None:
    store_vector(b, vectors.exp2(b, load_vector(b, x, LANES)), out)


_exp2 = vectors.callable_by_kernels(_emit_exp2)


@numba.njit
def _run(x: Any, out: Any) -> None:
    _exp2(x, out)


def exp2(values: list[float]) -> list[float]:
    x, out = np.zeros(LANES, np.float32), np.empty(LANES, np.float32)
    x[: len(values)] = values
    _run(x, out)
    return out[: len(values)].tolist()


def test_powers_of_two() -> None:
    given = [0.0, -0.3, -1.0, -17.5, -42.49, -99.99, -100.0]
    np.testing.assert_allclose(exp2(given), np.exp2(np.float32(given)), rtol=4e-7)


def test_what_is_nothing_beside_1_is_0_and_never_subnormal() -> None:
    assert exp2([-100.01, -126.5, -140.0, -3e38, float("-inf")]) == [0.0] * 5
    assert np.isnan(exp2([float("nan")]))
