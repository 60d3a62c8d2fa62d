"""One run: the world of a plan is built, lived through and looked at in the end."""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.determinism import of_world
from simulation.ending import check_ending
from simulation.faults import Faults
from simulation.invariants import Invariants
from simulation.library_person import LibraryPerson
from simulation.network import Delays
from simulation.plan import Plan
from simulation.raw_person import RawPerson
from simulation.server import Server, server_of
from simulation.settings import Drawn
from simulation.waiting import Waiting, bound_s
from simulation.world import Broken, World


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        invariant: the one that was broken; empty when all held.
        message: how.
        trace: the last things that happened.
        num_events: how many there were.
    """

    invariant: str
    message: str
    trace: tuple[str, ...]
    num_events: int


def run(plan: Plan, *, is_told: bool = False) -> Outcome:
    """Lives through a plan."""
    world = World(plan.seed)
    world.is_told = is_told
    logging.disable(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="microturn-simulation-"))
    invariant = message = ""
    try:
        with of_world(world):
            _live(world, plan, directory)
    except Broken as broken:
        invariant, message = broken.invariant, str(broken)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        invariant = f"{type(error).__name__} in {Path(where.filename).name}:{where.name}"
        message = "".join(traceback.format_exception(error)[-6:])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        logging.disable(logging.NOTSET)
    return Outcome(invariant, message, tuple(world.trace), world.num_events)


def _live(world: World, plan: Plan, directory: Path) -> None:
    drawn = Drawn.of(plan.knobs)
    delays = Delays(late_s=plan.knobs.late_ms / 1e3, late_share=plan.knobs.late_share)
    servers = [Server(world, number, drawn, delays, directory / str(number)) for number in range(plan.num_servers)]
    Invariants(world, servers)
    waiting = Waiting(world, bound_s(plan, drawn), len(plan.faults))

    def connect(session_id: Any, *ears: Any) -> Any:
        """A session has its server; while that is down, nobody listens."""
        return server_of(session_id, servers).connect(*ears)

    people: list[RawPerson | LibraryPerson] = []
    for person in plan.people:
        kind = RawPerson if person.is_raw else LibraryPerson
        people.append(kind(world, person, connect, waiting))
    Faults(world, servers, plan.faults)
    check_ending(world, plan, servers, people, waiting)
