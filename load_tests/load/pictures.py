"""Pictures of load tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

_GREEN, _AMBER, _RED = "#1a7f5a", "#c98a1b", "#b3372f"


def draw_run(path: Path, title: str, seconds: Sequence[Mapping[str, Any]]) -> None:
    """A run by the second: latencies, people and sessions, turns on time and not.

    Args:
        path: of the PNG file to write.
        title: of the picture.
        seconds: of the report.
    """
    figure, (latency, people, turns) = plt.subplots(3, sharex=True, figsize=(8, 7.5), layout="constrained")
    begins = seconds[0]["second"] if seconds else 0
    at = [second["second"] - begins for second in seconds]

    def column(name: str) -> list[float]:
        return [second[name] for second in seconds]

    means = [second["total_ms"] / second["num_turns"] if second["num_turns"] else None for second in seconds]
    latency.plot(at, means, color=_GREEN, label="mean", linewidth=1.5)
    latency.plot(at, column("max_ms"), ".", color=_AMBER, label="longest")
    latency.set(title=title, ylabel="latency of turns, ms", ylim=(0, None))
    people.step(at, column("num_users"), color=_AMBER, label="people", where="post")
    people.step(at, column("num_sessions"), color=_GREEN, label="sessions open", where="post")
    people.set(ylabel="there", ylim=(0, None))
    late = [second["num_due"] - second["num_on_time"] for second in seconds]
    turns.plot(at, column("num_turns"), color=_GREEN, label="turns", linewidth=1.5)
    turns.plot(at, late, color=_AMBER, label="not on time", linewidth=1.5)
    turns.plot(at, column("num_errors"), color=_RED, label="errors", linewidth=1.5)
    turns.set(xlabel="seconds", ylabel="per second", ylim=(0, None))
    for axes in (latency, people, turns):
        axes.legend(frameon=False, loc="upper right", ncols=3)
    save(figure, path)


def draw_capacity(path: Path, levels: Sequence[Mapping[str, Any]], wanted_share: float) -> None:
    """What each number of sessions that was tried has reached, and where the time of late turns went.

    Args:
        path: of the PNG file to write.
        levels: of the result, in any order.
        wanted_share: of turns on time.
    """
    levels = sorted(levels, key=lambda level: level["num_users"])
    users = [level["num_users"] for level in levels]
    figure, (shares, parts) = plt.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    shares.plot(users, [100 * level["on_time_share"] for level in levels], "o-", color=_GREEN)
    shares.axhline(100 * wanted_share, color="grey", linewidth=0.8)
    shares.set(title="Sessions that keep a beat of 200 ms", ylabel="turns on time, %", ylim=(0, 102))
    below = [0.0] * len(levels)
    for part in dict.fromkeys(name for level in levels for name in level["turn_ms"]):
        heights = [level["turn_ms"].get(part, 0.0) for level in levels]
        parts.bar(users, heights, bottom=below, label=part, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    parts.set(xlabel="sessions", ylabel="mean turn, ms")
    parts.xaxis.get_major_locator().set_params(integer=True)
    if users:
        parts.legend(frameon=False, ncols=3)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, with a faint grid and no frame but the two axes, and lets go of it."""
    for axes in figure.axes:
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
