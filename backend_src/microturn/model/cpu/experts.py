"""Which experts compute which rows, and in which order their results are added.

Rows are grouped by expert, so that a chosen expert's weights are read once in a step. A row's results are added in the
order of its experts' numbers, whatever the other rows choose: it has bitwise the same sum in any batch. Floats are
float32, and arrays contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu.kernel_cache import kernel

_Array = NDArray[Any]


@kernel()
def choose(logits: _Array, num_experts: int, num_chosen: int, is_normalised: bool, has_shared: bool) -> None:
    """Replaces logits by factors of experts, which are 0 for those that are not chosen.

    Args:
        logits: [rows, at least experts], and that of the shared expert behind them.
        num_experts: to choose among.
        num_chosen: of each row, with the highest logits; the first ones among equals.
        is_normalised: whether the factors of the chosen ones add up to 1, otherwise those of all.
        has_shared: whether there is an expert of all rows, whose factor is the sigmoid of its logit.
    """
    left = np.empty(num_experts, np.float32)
    for row in range(logits.shape[0]):
        of_row = logits[row]
        peak = of_row[:num_experts].max()
        total, of_chosen = np.float32(0), np.float32(0)
        for expert in range(num_experts):
            left[expert] = np.exp(of_row[expert] - peak)
            total += left[expert]
        of_row[:num_experts] = 0
        for _ in range(num_chosen):
            best = left.argmax()
            of_row[best] = left[best] / total
            of_chosen += of_row[best]
            left[best] = -1
        if is_normalised:
            for expert in range(num_experts):
                of_row[expert] /= of_chosen
        if has_shared:
            of_row[num_experts] = np.float32(1) / (np.float32(1) + np.exp(-of_row[num_experts]))


@kernel()
def gather(x: _Array, factors: _Array, expert: int, rows: _Array, given: _Array) -> int:
    """Collects the rows of an expert.

    Args:
        x: [rows, width].
        factors: by `choose`.
        expert: its number.
        rows: int64 [at least its rows], written: which they are.
        given: [at least its rows, width], written: what they have in x.

    Returns:
        Their number.
    """
    count = 0
    for row in range(x.shape[0]):
        if factors[row, expert] != 0:
            rows[count] = row
            given[count] = x[row]
            count += 1
    return count


@kernel()
def add(result: _Array, factors: _Array, expert: int, rows: _Array, out: _Array) -> None:
    """Adds an expert's results [its rows, width], times its factors, to its rows of out [rows, width].

    Args:
        result: of the expert.
        factors: see `gather`; `rows` likewise.
        expert: its number.
        rows: int64, whose first ones are used.
        out: changed.
    """
    for index in range(result.shape[0]):
        row = rows[index]
        factor = factors[row, expert]
        for d in range(out.shape[1]):
            out[row, d] += factor * result[index, d]
