"""The scenarios by name: who takes part in a run, how many, and what it must reach. Knows no Locust."""

from __future__ import annotations

from dataclasses import dataclass

from load_tests.load.thresholds import Thresholds


@dataclass(frozen=True)
class Plan:
    """A scenario.

    Attributes:
        purpose: what a run of it shows.
        people: classes of `scenarios.py`, in equal numbers; none stands for `MIX`.
        num_users: how many there are unless told; few enough for two cores and the embedded model.
        thresholds: unless told.
    """

    purpose: str
    people: tuple[str, ...]
    num_users: int
    thresholds: Thresholds


# Of a hundred people where nobody says who comes: what a product's users do, guessed; a herd is a test of its own.
MIX = {"Chat": 30, "Beat": 30, "BargeIn": 15, "Churn": 10, "LongSession": 10, "SlowReader": 5}

PLANS = {
    "mix": Plan(
        "people of all kinds who use a product together",
        (),
        8,
        Thresholds(min_on_time=0.95),
    ),
    "beat": Plan("turns every 200 ms meet their beat", ("Beat",), 4, Thresholds()),
    "chat": Plan("who waits for each answer gets it", ("Chat",), 4, Thresholds()),
    "churn": Plan("sessions that vanish leave nothing behind", ("Churn",), 4, Thresholds(min_on_time=0.95)),
    "barge-in": Plan(
        "answers that are talked over stop and are cut where they were heard", ("BargeIn",), 4, Thresholds()
    ),
    "long": Plan("sessions of thousands of tokens meet a beat of a second", ("LongSession",), 3, Thresholds()),
    "herd": Plan("sessions that open at one instant are all served", ("Herd",), 16, Thresholds()),
    "slow-readers": Plan(
        "who reads slowly holds up nobody else", ("Beat", "SlowReader"), 4, Thresholds(min_on_time=0.95)
    ),
}
