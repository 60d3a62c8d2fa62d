"""Who waits for an answer, since when, and how long that may take. Knows no people and no servers.

A turn that has been delivered ends, with an answer or an error, in bounded virtual time. The bound is not guessed: it
is what all the work of the plan takes, were all of it done before that turn, with all that goes wrong on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from microturn_client._retry import DEFAULT_RECOVERY
from simulation.plan import Plan
from simulation.settings import Drawn
from simulation.world import Broken, Event, World

_SLACK_S = 5.0


@dataclass(eq=False)
class Wait:
    """Somebody waits."""

    what: str
    since_s: float
    alarm: Event | None = None


class Waiting:
    """All who wait.

    Args:
        world: the clock.
        bound_s: how long each may wait.
        num_faults: how often who survives them may have to ask again, after twice the time each.
    """

    def __init__(self, world: World, bound_s: float, num_faults: int) -> None:
        self.bound_s = bound_s
        self.durable_s = bound_s + 2 * DEFAULT_RECOVERY.ask_again_after_s * 2.0 ** (num_faults + 1)
        self._world = world
        self._waits: dict[Wait, None] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, what: str, *, is_durable: bool = False) -> Wait:
        """Somebody begins to wait; who survives faults by herself waits for them too."""
        wait = Wait(what, self._world.now_s)
        bound_s = self.durable_s if is_durable else self.bound_s
        wait.alarm = self._world.after(bound_s, lambda: self._raise(wait, bound_s))
        self._waits[wait] = None
        return wait

    def end(self, wait: Wait) -> None:
        """The answer came, or nobody waits for it any more."""
        if wait.alarm is not None:
            wait.alarm.call_off()
        self._waits.pop(wait, None)

    def _raise(self, wait: Wait, bound_s: float) -> None:
        raise Broken("bounded time", f"{wait.what} has no answer after {bound_s:.1f} s of virtual time")


def bound_s(plan: Plan, drawn: Drawn) -> float:
    """How long a turn of a plan may take at most."""
    acts = [act for person in plan.people for act in person.acts]
    num_turns = len(acts) * 5  # those of acts that say much at once
    least_tokens = max(1, drawn.settings.max_batch_tokens // 16)
    passes_each = -(-drawn.max_context // least_tokens) + 30
    pass_s = 1.2 * (drawn.pass_s + drawn.token_s * drawn.settings.max_batch_tokens)
    faults_s = sum(2 * fault.for_s + 20.0 for fault in plan.faults)
    unread_s = sum(act.pause_s for act in acts)
    late_s = plan.knobs.late_ms / 1e3 * len(acts)
    return _SLACK_S + num_turns * passes_each * pass_s + faults_s + unread_s + late_s
