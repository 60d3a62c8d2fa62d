"""The numbers of many sampling rows as columns on the device, and the random number of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.transfer import upload
from microturn.model.sampling_row import SamplingRow


class SamplingColumns(NamedTuple):
    """The rows' options, each float64 [rows, 1] on the device; a disabled filter is infinite, for min_p 0.

    They are the columns of one tensor [rows, fields].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    dice: Tensor

    def of_rows(self, first: int, end: int) -> SamplingColumns:
        """Those of some rows that follow each other."""
        return SamplingColumns(*(column[first:end] for column in self))


def sampling_columns(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> SamplingColumns:
    """The columns of rows, in their order."""
    # One list and NumPy: torch takes twice as long for tuples.
    options = np.array(
        [
            (
                row.options.temperature,
                row.options.top_k if 0 < row.options.top_k < vocab_size else np.inf,
                row.options.top_p if row.options.top_p < 1 else np.inf,
                row.options.min_p,
                row.options.repetition_penalty,
                row.options.frequency_penalty,
                row.options.presence_penalty,
                0.0,
            )
            for row in rows
        ]
    )
    options[:, -1] = uniform([row.seed for row in rows], [row.position for row in rows])
    return SamplingColumns(*upload(torch.from_numpy(options), device).unsqueeze(-1).unbind(1))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) from each seed and position (SplitMix64: Steele, Lea and Flood, 2014); [n].

    Args:
        seeds: below 2**64.
        positions: as many, likewise.
    """
    drawn = _splitmix64(_splitmix64(np.array(seeds, np.uint64)) ^ np.array(positions, np.uint64))
    return (drawn >> np.uint64(11)) * 2.0**-53


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Arrays of unsigned integers wrap around, as the algorithm has it.
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
