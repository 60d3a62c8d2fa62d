"""The units of a step of native attention that wait to be taken by its threads, and where their keys are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from numpy.typing import NDArray

from microturn.model.cpu.attention_pages import PageShape, locate
from microturn.model.cpu.self_scheduling import take

_Array = NDArray[Any]


class Queue(NamedTuple):
    """All units of a step, and what finds their keys (see `Work` and `Tables`).

    Attributes:
        counters: of the step, see `Work`.
        units: of the step; `tasks` likewise.
        page_ids: of the layer's group.
        page_indptr: of the layer's kind.
    """

    counters: _Array
    units: _Array
    tasks: _Array
    page_ids: _Array
    page_indptr: _Array


@numba.njit(nogil=True)
def pages_of(queue: Queue, task: _Array) -> _Array:
    """The pages of a task's row, and others behind them."""
    pages: _Array = queue.page_ids[queue.page_indptr[task[0]] :]
    return pages


@numba.njit(nogil=True)
def take_unit(queue: Queue, of: PageShape, at: _Array) -> int:
    """Takes the next unit, if there is one, and finds its first block.

    Returns:
        Its number, or that of the units or more.
    """
    number: int = take(queue.counters, 0)
    if number < queue.units.shape[0]:
        task = queue.tasks[queue.units[number, 0]]
        locate(pages_of(queue, task), task[5], task[6], of, queue.units[number, 2], at)
    return number
