"""What people saw: times, counts and errors by scenario, and all of it by the second.

Each process of a run keeps one record, and they add up to one without loss. Knows no Locust.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from load_tests.load.histogram import Histogram
from microturn_client import Status

# Where the time of a turn goes: before it was sent (behind the turn before it, and this program's own lateness), around
# the engine (network, Triton, the adapter, the client), and on the server.
PARTS = ("held_up", "around", "queue", "restore", "prefill", "decode")


@dataclass(frozen=True)
class Answered:
    """A turn that ended well, by one clock.

    Attributes:
        due_s: when it was due; of a closed loop, when it was sent.
        sent_s: when it was sent.
        first_token_s: when its first token came, if any did.
        ended_s: when its end came.
        deadline_s: seconds from `due_s` in which it should have ended, if any.
        status: that it ended with.
    """

    due_s: float
    sent_s: float
    first_token_s: float | None
    ended_s: float
    deadline_s: float | None
    status: Status

    @property
    def latency_ms(self) -> float:
        """From when it was due."""
        return (self.ended_s - self.due_s) * 1e3

    @property
    def is_late(self) -> bool:
        """Whether it missed its deadline."""
        return self.deadline_s is not None and self.ended_s - self.due_s > self.deadline_s

    @property
    def parts_ms(self) -> dict[str, float]:
        """By `PARTS`; they add up to the latency."""
        timing = self.status.timing_ms
        on_server = {part: getattr(timing, part) for part in ("queue", "restore", "prefill", "decode")}
        sent_ms = (self.ended_s - self.sent_s) * 1e3
        held_up_ms = (self.sent_s - self.due_s) * 1e3
        return {"held_up": held_up_ms, "around": sent_ms - sum(on_server.values()), **on_server}


@dataclass
class Scene:
    """What the people of one scenario saw.

    Attributes:
        times: milliseconds, by what was timed; docs/load-tests.md says what each is.
        counts: how often what happened.
        errors: turns that failed, by code.
        late_ms: of answered turns that missed their deadline (`counts["late"]`), milliseconds by `PARTS`, added up.
    """

    times: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    late_ms: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Scene) -> None:
        """Adds what others of this scenario saw."""
        for name, histogram in other.times.items():
            self.times[name].merge(histogram)
        self.counts.update(other.counts)
        self.errors.update(other.errors)
        self.late_ms.update(other.late_ms)

    def as_json(self) -> dict[str, Any]:
        """All of it, for another process."""
        times = {name: histogram.as_json() for name, histogram in self.times.items()}
        return {"times": times, "counts": self.counts, "errors": self.errors, "late_ms": self.late_ms}

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Self:
        """What `as_json` wrote."""
        scene = cls(
            counts=Counter(written["counts"]), errors=Counter(written["errors"]), late_ms=Counter(written["late_ms"])
        )
        scene.times.update({name: Histogram.from_json(of) for name, of in written["times"].items()})
        return scene


@dataclass
class Second:
    """What happened in a second.

    Attributes:
        num_users: people who were there.
        num_sessions: sessions that were open at its beginning.
        num_due: turns with a deadline that ended, failed or were given up.
        num_on_time: of these, those that met it.
        num_errors: turns that failed.
        total_ms: latencies of the turns that ended, added up.
        num_turns: how many these are.
        max_ms: the longest.
    """

    num_users: int = 0
    num_sessions: int = 0
    num_due: int = 0
    num_on_time: int = 0
    num_errors: int = 0
    total_ms: float = 0.0
    num_turns: int = 0
    max_ms: float = 0.0

    def merge(self, other: Second) -> None:
        """Adds what others saw in the same second."""
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "max_ms" else mine + value)


@dataclass
class Record:
    """What a process saw.

    Attributes:
        scenes: by scenario.
        seconds: by the second of the Unix clock.
    """

    scenes: defaultdict[str, Scene] = field(default_factory=lambda: defaultdict(Scene))
    seconds: defaultdict[int, Second] = field(default_factory=lambda: defaultdict(Second))

    def answered(self, scenario: str, turn: Answered, now: int) -> None:
        """A turn ended well in this second."""
        scene = self.scenes[scenario]
        scene.counts["turns"] += 1
        scene.counts["tokens"] += turn.status.usage.output_tokens
        times = scene.times
        times["turn"].add(turn.latency_ms)
        times["turn_sent"].add((turn.ended_s - turn.sent_s) * 1e3)
        times["every_sent"].add((turn.ended_s - turn.sent_s) * 1e3)
        times["turn_server"].add(turn.status.timing_ms.total)
        for part, ms in turn.parts_ms.items():
            times[part].add(ms)
        if turn.first_token_s is not None:
            times["first_token"].add((turn.first_token_s - turn.due_s) * 1e3)
        if turn.is_late:
            scene.counts["late"] += 1
            scene.late_ms.update(turn.parts_ms)
        if turn.deadline_s is not None:
            self._had_deadline(scenario, now, is_on_time=not turn.is_late)
        self._timed(now, turn.latency_ms)

    def opened(self, scenario: str, ms: float) -> None:
        """A session was opened by a turn that appended its prompt, and that took so long."""
        self.scenes[scenario].times["open"].add(ms)
        self.scenes[scenario].times["every_sent"].add(ms)

    def given_up(self, scenario: str, waited_s: float, deadline_s: float, now: int) -> None:
        """A turn was due and has no answer: it is late by its waiting. One that might yet be on time is not counted."""
        if waited_s > deadline_s:
            self.scenes[scenario].counts["given_up"] += 1
            self.scenes[scenario].times["turn"].add(waited_s * 1e3)
            self._had_deadline(scenario, now, is_on_time=False)
            self._timed(now, waited_s * 1e3)

    def failed(self, scenario: str, code: str, now: int, *, had_deadline: bool) -> None:
        """A turn failed."""
        self.scenes[scenario].errors[code] += 1
        self.seconds[now].num_errors += 1
        if had_deadline:
            self._had_deadline(scenario, now, is_on_time=False)

    def _had_deadline(self, scenario: str, now: int, *, is_on_time: bool) -> None:
        self.scenes[scenario].counts["due"] += 1
        self.scenes[scenario].counts["on_time"] += is_on_time
        self.seconds[now].num_due += 1
        self.seconds[now].num_on_time += is_on_time

    def _timed(self, now: int, ms: float) -> None:
        second = self.seconds[now]
        second.num_turns += 1
        second.total_ms += ms
        second.max_ms = max(second.max_ms, ms)

    def merge(self, other: Record) -> None:
        """Adds what another process saw."""
        for name, scene in other.scenes.items():
            self.scenes[name].merge(scene)
        for now, second in other.seconds.items():
            self.seconds[now].merge(second)

    @property
    def total(self) -> Scene:
        """What all people saw together."""
        total = Scene()
        for scene in self.scenes.values():
            total.merge(scene)
        return total

    def take(self) -> dict[str, Any]:
        """All of it, for another process; it is empty afterwards."""
        taken = {
            "scenes": {name: scene.as_json() for name, scene in self.scenes.items()},
            "seconds": {str(now): asdict(second) for now, second in self.seconds.items()},
        }
        self.scenes.clear()
        self.seconds.clear()
        return taken

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Self:
        """What `take` took."""
        record = cls()
        record.scenes.update({name: Scene.from_json(scene) for name, scene in written["scenes"].items()})
        record.seconds.update({int(now): Second(**second) for now, second in written["seconds"].items()})
        return record
