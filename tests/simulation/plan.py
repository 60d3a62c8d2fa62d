"""What a seed draws: how the servers are set, who talks and what they say, and what goes wrong when.

A plan is data, and each part of it has a name, so that a finding can be told as a seed and the names of what may be
left out: `person:2` a person, `act:2.5` one thing that she does, `fault:1` a fault, `knob:page_size` a knob that is its
default again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from simulation.settings import Knobs, draw_knobs, turned
from support.fake_runner import VOCAB_SIZE

# What raw people do, and how often.
_ACTS = {
    "say": 10,
    "say_much": 4,
    "talk_over": 3,
    "repeat": 3,
    "say_otherwise": 1,
    "say_any_number": 1,
    "say_nonsense": 2,
    "say_too_much": 1,
    "come_with_any_key": 1,
    "start": 2,
    "fork": 1,
    "resume": 2,
    "keep_alive": 2,
    "leave": 3,
    "stop_reading": 2,
    "read": 2,
    "flood": 0.3,
    "hang_up": 1,
    "fall_silent": 1,
}
# What users of the client library do.
_LIBRARY_ACTS = {"say": 12, "interrupt": 3, "leave": 2, "fork": 1, "fall_silent": 1, "wait": 2, "close": 1}

_FAULTS = {
    "break_streams": 4,
    "mute_streams": 1,
    "lose_answers": 1,
    "kill": 2,
    "kill_stub": 1,
    "stop": 2,
    "freeze": 2,
    "fail_pass": 2,
    "fail_build": 1,
    "slow_passes": 1,
    "break_disk": 2,
    "fill_disk": 1,
    "freeze_disk": 1,
    "damage_files": 1,
    "jump_wall_clock": 1,
    "take_pages": 1,
}


@dataclass(frozen=True)
class Act:
    """One thing that somebody does. What she does not say is None; not every kind of act looks at everything.

    Attributes:
        pause_s: before it.
        kept_eighths: of the context, what a rewind keeps; above 8 it goes beyond the end.
        choice: which of those that there are.
    """

    number: int
    kind: str
    pause_s: float = 0.0
    ids: tuple[int, ...] = ()
    text: str | None = None
    num_embeds: int = 0
    max_tokens: int = 0
    is_numbered: bool = False
    kept_eighths: int | None = None
    on_overlap: str | None = None
    deadline_ms: float | None = None
    end: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    is_windowed: bool = False
    priority: int = 0
    choice: int = 0


@dataclass(frozen=True)
class Person:
    """Somebody who talks.

    Attributes:
        session_id: of her session; two people may have the same one.
        is_raw: whether she writes to the wire herself, or uses the client library.
    """

    number: int
    session_id: int | str
    key: str | None
    seed: int
    is_raw: bool
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    number: int
    kind: str
    at_s: float
    for_s: float
    server: int
    choice: int


@dataclass(frozen=True)
class Plan:
    """All of a run but the small chances on its way."""

    seed: int
    knobs: Knobs
    num_servers: int
    people: tuple[Person, ...]
    faults: tuple[Fault, ...]
    left_out: frozenset[str] = frozenset()

    def parts(self) -> list[str]:
        """The names of all that can be left out, the largest first."""
        return [
            *(f"person:{person.number}" for person in self.people),
            *(f"fault:{fault.number}" for fault in self.faults),
            *(f"knob:{name}" for name in turned(self.knobs)),
            *(f"act:{person.number}.{act.number}" for person in self.people for act in person.acts),
        ]

    def without(self, names: frozenset[str]) -> Plan:
        """The plan without some of its parts."""
        people = [
            replace(
                person,
                acts=tuple(act for act in person.acts if f"act:{person.number}.{act.number}" not in names),
            )
            for person in self.people
            if f"person:{person.number}" not in names
        ]
        defaults = {knob.name: knob.default for knob in fields(Knobs) if f"knob:{knob.name}" in names}
        return replace(
            self,
            knobs=replace(self.knobs, **defaults),
            people=tuple(person for person in people if person.acts),
            faults=tuple(fault for fault in self.faults if f"fault:{fault.number}" not in names),
            left_out=self.left_out | names,
        )

    @property
    def told_left_out(self) -> str:
        """What was left out, as the command takes it: an act of a person who is left out goes without saying."""
        people = {name for name in self.left_out if name.startswith("person:")}
        return ",".join(sorted(name for name in self.left_out if f"person:{_person_of(name)}" not in people - {name}))

    @property
    def length_s(self) -> float:
        """When everybody has said everything, if nothing were waited for."""
        return max((sum(act.pause_s for act in person.acts) for person in self.people), default=0.0)


def _person_of(name: str) -> str:
    """The number of the person whose act has this name."""
    kind, _, number = name.partition(":")
    return number.partition(".")[0] if kind == "act" else ""


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan/{seed}")
    knobs = draw_knobs(seed)
    num_servers = random.choice([1, 1, 2])
    people = []
    for number in range(random.choice([1, 2, 3, 3, 4, 5, 6])):
        people.append(_draw_person(random, knobs, number, people))
    length_s = max(sum(act.pause_s for act in person.acts) for person in people)
    num_faults = random.choice([0, 0, 1, 2, 4])
    faults = tuple(
        Fault(
            number,
            random.choices(list(_FAULTS), list(_FAULTS.values()))[0],
            random.uniform(0.0, length_s),
            random.choice([0.05, 0.5, 3.0, 8.0]),
            random.randrange(num_servers),
            random.randrange(1 << 20),
        )
        for number in range(num_faults)
    )
    return Plan(seed, knobs, num_servers, tuple(people), faults)


def _draw_person(random: Random, knobs: Knobs, number: int, others: list[Person]) -> Person:
    is_raw = random.random() < 0.65
    session_id: int | str = random.choice([number + 1, number + 1, f"s{number}"])
    key = random.choice([None, None, "hers", "his"])
    raw_others = [other for other in others if other.is_raw]
    if is_raw and raw_others and random.random() < 0.15:
        session_id, key = raw_others[0].session_id, random.choice([raw_others[0].key, key])
    kinds = _ACTS if is_raw else _LIBRARY_ACTS
    pace = random.choice(["at once", "on the beat", "slow"])
    drawn = random.choices(list(kinds), list(kinds.values()), k=random.choice([2, 4, 8, 12, 20]))
    acts = []
    for act_number, kind in enumerate(["start" if is_raw else "say", *drawn]):
        acts.append(_draw_act(random, knobs, act_number, kind, pace, is_raw=is_raw))
    return Person(number, session_id, key, random.randrange(1 << 31), is_raw, tuple(acts))


def _draw_act(random: Random, knobs: Knobs, number: int, kind: str, pace: str, *, is_raw: bool) -> Act:
    is_plain = random.random() < 0.6  # as most users' turns are: with no option but max_tokens
    most = knobs.max_context * 5 // 8 if number == 0 or random.random() < 0.1 else 24
    form = random.random()
    pauses = {"at once": (0.0, 0.02), "on the beat": (0.15, 0.25), "slow": (0.0, 4.0)}
    act = Act(
        number,
        kind,
        pause_s=random.uniform(*pauses[pace]),
        # Some begin alike, so that prefixes are shared.
        ids=tuple(range(10, 10 + min(most, 86))) if form < 0.2 else _ids(random, random.randint(0, most)),
        text="".join(random.choices("ABCDEFGH 012", k=random.randint(0, 12))) if form > 0.85 else None,
        num_embeds=random.randint(1, 5) if 0.78 < form <= 0.85 else 0,
        max_tokens=random.choice([0, 0, 1, 2, 4, 8, 16, 30]),
        is_numbered=random.random() < 0.5,
        on_overlap=random.choice([None, None, None, "queue", "interrupt"]) if is_raw else None,
        choice=random.randrange(1 << 20),
    )
    if is_plain:
        return replace(act, on_overlap=None) if kind != "talk_over" else act
    return replace(
        act,
        kept_eighths=random.choice([None, None, None, None, *range(10)]),
        deadline_ms=random.choice([None, None, None, 0.0, 25.0, 100.0, 1000.0]) if is_raw else None,
        end=random.random() < 0.08,
        sampling=random.choice(
            [
                {},
                {},
                {"temperature": 0.9},
                {"temperature": 1.3, "top_k": 20, "seed": random.randrange(100)},
                {"repetition_penalty": 1.3},
                {"temperature": 1.0, "frequency_penalty": 0.5},
                {"min_tokens": 3},
                {"ignore_eos": True},
                {"speculate": "ngram"},
                {"speculate": "ngram", "temperature": 0.9},
                {"stop_token_ids": [5, 7, 11, 13, 17]},
            ]
        ),
        is_windowed=random.random() < 0.3,
        priority=random.choice([0, 0, 1, 5, -5]),
    )


def _ids(random: Random, num_ids: int) -> tuple[int, ...]:
    return tuple(random.choices(range(VOCAB_SIZE), k=num_ids))
