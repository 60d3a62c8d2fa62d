"""`python -m simulation SEEDS`: runs many seeds on all cores, or one of them with all that happens in it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence

from simulation.plan import Plan, draw_plan
from simulation.run import Outcome, run
from simulation.shrink import shrink

# A finding is made small for the first seeds only that have it.
_NUM_SHRUNK = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Runs seeds; the exit status says whether nothing was found."""
    parser = argparse.ArgumentParser(prog="make simulate", description="Runs Microturn under a virtual clock.")
    parser.add_argument("seeds", help="one seed, or FIRST:LAST, LAST excluded")
    parser.add_argument("--without", default="", help="parts of the plan to leave out, as a finding names them")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args(argv)
    first, _, last = given.seeds.partition(":")
    if not last:
        sys.exit(_replay(draw_plan(int(first)).without(_names(given.without))))
    sys.exit(_sweep(range(int(first), int(last)), given.processes))


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


def _replay(plan: Plan) -> int:
    print(plan)
    outcome = run(plan, is_told=True)
    print(f"{outcome.num_events} events; {outcome.message or 'nothing was found'}")
    return bool(outcome.invariant)


def _sweep(seeds: range, num_processes: int) -> int:
    begun_s = time.monotonic()
    num_events = 0
    found: dict[str, list[int]] = {}
    for num_done, (seed, outcome) in enumerate(outcomes(seeds, num_processes), start=1):
        num_events += outcome.num_events
        if outcome.invariant:
            found.setdefault(outcome.invariant, []).append(seed)
            _tell(seed, outcome, is_shrunk=sum(map(len, found.values())) <= _NUM_SHRUNK)
        if sys.stderr.isatty() or num_done % 500 == 0 or num_done == len(seeds):
            elapsed_s = time.monotonic() - begun_s
            end = "\r" if sys.stderr.isatty() and num_done < len(seeds) else "\n"
            num_found = sum(map(len, found.values()))
            line = f"{num_done}/{len(seeds)} seeds, {num_events} events, {elapsed_s:.0f} s, {num_found} findings"
            print(line, end=end, file=sys.stderr, flush=True)
    for invariant, its_seeds in found.items():
        print(f"{len(its_seeds)} × {invariant}: seeds {its_seeds[:20]}")
    return bool(found)


def outcomes(seeds: range, num_processes: int) -> Iterator[tuple[int, Outcome]]:
    """What comes of some seeds, in any order."""
    if num_processes <= 1:
        yield from map(_live, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes, _be_one_of_many) as pool:
        yield from pool.imap_unordered(_live, seeds, chunksize=5)


def _be_one_of_many() -> None:
    import torch

    torch.set_num_threads(1)


def _live(seed: int) -> tuple[int, Outcome]:
    return seed, run(draw_plan(seed))


def _tell(seed: int, outcome: Outcome, *, is_shrunk: bool) -> None:
    print(f"\nseed {seed}: {outcome.message}")
    if not is_shrunk:
        print(f"replay: make simulate SEEDS={seed}", flush=True)
        return
    plan = shrink(draw_plan(seed), outcome.invariant)
    smallest = run(plan)
    print("\n".join(smallest.trace[-30:]))
    print(f"{smallest.message}\n{len(plan.parts())} parts are left: {' '.join(plan.parts())}")
    print(f"replay: make simulate SEEDS={seed} ARGS='--without {plan.told_left_out}'", flush=True)
