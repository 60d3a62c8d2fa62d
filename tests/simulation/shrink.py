"""Makes a finding small: leaves out what it does not need, as long as the same invariant is broken.

Large parts go first, a person or a fault or a knob, then single acts, until no part can be left out by itself. Sets of
parts are tried before single ones, since half of a plan most often has nothing to do with it (Zeller and Hildebrandt's
delta debugging, 2002).
"""

from __future__ import annotations

from collections.abc import Callable

from simulation.plan import Plan
from simulation.run import Outcome, run


def shrink(plan: Plan, invariant: str, *, max_runs: int = 300, lives: Callable[[Plan], Outcome] = run) -> Plan:
    """The smallest plan found that breaks the same invariant.

    Args:
        plan: one that breaks it.
        invariant: its name.
        max_runs: how many plans are tried.
        lives: runs a plan.
    """
    num_runs, whole = 0, plan
    size = max(1, len(plan.parts()) // 2)
    while num_runs < max_runs:
        parts, is_smaller = plan.parts(), False
        for first in range(0, len(parts), size):
            smaller = plan.without(frozenset(parts[first : first + size]))
            num_runs += 1
            if smaller.people and lives(smaller).invariant == invariant:
                plan, is_smaller = smaller, True
                break
            if num_runs >= max_runs:
                break
        if is_smaller:
            size = max(1, min(size, len(plan.parts()) // 2))
        elif size == 1:
            break
        else:
            size //= 2
    silent = {f"person:{person.number}" for person in whole.people} - set(plan.parts())
    return plan.without(frozenset(silent))
