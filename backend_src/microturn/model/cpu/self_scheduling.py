"""Work that threads take from one counter, piece by piece, as OpenMP's ``schedule(dynamic)`` divides it.

Numba gives each thread the same share of a parallel loop. But other threads run on these CPUs too, those that send
answers above all: one that is held up would hold up the step, while the others wait. Results do not depend on who
computes a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
    (kind,), (array,) = signature.args, args
    pointer = context.make_array(kind)(context, builder, array).data
    return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")


def _take(typing_context: Any, counter: Any) -> tuple[Any, Any]:  # noqa: ARG001  Numba's protocol
    """``take(counter)`` is the number of the next piece: what an int64 [1] counts, one more from then on for all."""
    return types.int64(counter), _emit


take = intrinsic(_take)
