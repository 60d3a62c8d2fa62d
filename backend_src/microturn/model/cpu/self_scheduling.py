"""Work that threads take from one counter, piece by piece, as OpenMP's ``schedule(dynamic)`` divides it.

Numba gives each thread the same share of a parallel loop. But other threads run on these CPUs too, those that send
answers above all: one that is held up would hold up the step, while the others wait. Results do not depend on who
computes a piece. What needs several pieces is computed by the thread that ends the last of them, which a counter tells
too: all that a thread wrote before it counts is there for those that count after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
    (kind, _), (array, index) = signature.args, args
    counters = context.make_array(kind)(context, builder, array).data
    return builder.atomic_rmw("add", builder.gep(counters, [index]), ir.IntType(64)(1), "acq_rel")


def _take(typing_context: Any, counters: Any, index: Any) -> tuple[Any, Any]:  # noqa: ARG001  Numba's protocol
    """``take(counters, index)`` is what this counter of int64 [n] counts, one more from then on for all threads."""
    return types.int64(counters, types.int64), _emit


take = intrinsic(_take)
