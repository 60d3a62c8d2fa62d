"""A layer's `Scores` as kernels take them: for a softmax of powers of 2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.scores import Scores

_Array = NDArray[Any]

_LOG2_E = math.log2(math.e)


class KernelScores(NamedTuple):
    """The scores of a layer. What is None is no part of the kernel that is compiled for it.

    Attributes:
        scale: float32, factor of the products: they become logarithms to the base 2, or with a soft cap parts of it.
        soft_cap: float32, of logarithms to the base 2, or None.
        sink_logits: float32 [heads], natural logarithms, or None.
    """

    scale: np.float32
    soft_cap: np.float32 | None
    sink_logits: NDArray[np.float32] | None

    @classmethod
    def of(cls, scores: Scores) -> Self:
        sink_logits = None if scores.sink_logits is None else scores.sink_logits.numpy()
        if scores.soft_cap is None:
            return cls(np.float32(scores.scale * _LOG2_E), None, sink_logits)
        return cls(np.float32(scores.scale / scores.soft_cap), np.float32(scores.soft_cap * _LOG2_E), sink_logits)


@numba.njit(nogil=True)
def norm_of(peak: np.float32, total: np.float32, sink_logits: _Array | None, head: int) -> np.float32:
    """The factor of a query's weighted values: the inverse of its total weight, that of the sink logit included.

    Args:
        peak: the highest score; the total and the values are relative to it.
        total: of the weights.
        sink_logits: see `KernelScores`.
        head: of the query.
    """
    if sink_logits is None:
        return np.float32(1) / total
    sink = sink_logits[head] * np.float32(_LOG2_E)
    top = max(peak, sink)
    shrink = np.exp2(peak - top)
    norm: np.float32 = shrink / (total * shrink + np.exp2(sink - top))
    return norm
