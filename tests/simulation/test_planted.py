"""What the simulator is for: faults that are planted back are found, within few seeds, under the right name.

Each was in the product once. Where the simulator misses one, it looks at less than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from microturn.hosts.triton.responses import Responses
from microturn.hosts.triton.sequence_slots import SequenceSlots
from microturn.kv import pool as kv_pool
from microturn.sessions import results
from microturn_client._opening import begin_branch
from simulation import library_person
from simulation.plan import draw_plan
from simulation.run import Outcome, run
from simulation.shrink import shrink


def _find(first: int, num_seeds: int, *, invariants: set[str]) -> tuple[int, Outcome]:
    """The first of some seeds that finds one of these."""
    for seed in range(first, first + num_seeds):
        outcome = run(draw_plan(seed))
        if outcome.invariant in invariants:
            return seed, outcome
    raise AssertionError(f"{num_seeds} seeds have found nothing")


def test_the_deadlock_of_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the prefix cache and a session both refer to counted as one that nobody can free: two people with
    default settings, and nobody is answered any more."""
    monkeypatch.setattr(kv_pool.PagePool, "num_freeable", _counting_the_cache)
    # One seed in some hundreds has it: this begins shortly before one.
    seed, outcome = _find(205, 10, invariants={"progress", "AssertionError in engine.py:check_integrity"})
    smallest = shrink(draw_plan(seed), outcome.invariant, max_runs=60)
    assert run(smallest).invariant == outcome.invariant
    assert len(smallest.parts()) < len(draw_plan(seed).parts())


def _counting_the_cache(pool: Any, owners: Any) -> int:
    from collections import Counter

    references = Counter(page for pages in owners for page in pages)
    return sum(count == pool._counts[page] + (page in pool._kept) for page, count in references.items())


def test_a_lost_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A START that is refused, and a session that has expired, hold their slots of Triton's for ever."""
    monkeypatch.setattr(SequenceSlots, "_send", lambda *_: None)
    _find(0, 200, invariants={"slots"})


def test_a_doubled_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numbered turn that comes again is done again."""
    monkeypatch.setattr(results.Results, "find", lambda *_: None)
    _find(0, 200, invariants={"answer", "context", "transcript", "tokens once"})


def test_a_branch_of_what_the_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch begins where its parent ends on the server, also while that is told again what it was."""
    monkeypatch.setattr(library_person, "begin_branch", _beginning_anywhere)
    # One seed in a hundred has it: this begins shortly before one.
    _find(175, 100, invariants={"fork"})


def _beginning_anywhere(*args: Any) -> Any:
    core, opening = begin_branch(*args)
    opening.options.pop("rewind_to", None)
    return core, opening


def test_a_buffer_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read asks for what costs nothing, and every answer waits for it in the server."""
    monkeypatch.setattr(Responses, "_answer", _answering_all)
    _find(0, 200, invariants={"unread"})


def _answering_all(responses: Any, stream: Any, answer: Any) -> None:
    if stream in responses._unanswered:
        responses._send(stream, answer)


def test_a_list_that_is_never_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives as long as the engine keeps something of each turn."""
    _grow(monkeypatch)
    _find(0, 10, invariants={"memory"})


def _grow(monkeypatch: pytest.MonkeyPatch) -> None:
    from microturn.engine.lifecycle import Lifecycle

    init: Callable[..., None] = Lifecycle.__init__
    finish: Callable[..., None] = Lifecycle.finish

    def begin(lifecycle: Any, *args: Any, **kwargs: Any) -> None:
        init(lifecycle, *args, **kwargs)
        lifecycle._ended = []

    def finish_and_keep(lifecycle: Any, session: Any, turn: Any, *args: Any) -> None:
        lifecycle._ended.append(turn)
        finish(lifecycle, session, turn, *args)

    monkeypatch.setattr(Lifecycle, "__init__", begin)
    monkeypatch.setattr(Lifecycle, "finish", finish_and_keep)
