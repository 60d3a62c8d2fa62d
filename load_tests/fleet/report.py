"""What a simulated fleet went through, as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
import numpy as np

from load_tests.bench.results import print_table
from load_tests.fleet.placement import Ints
from load_tests.fleet.simulation import Course, Fleet, Moved, missed_beats
from load_tests.load.pictures import save

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt

_COLOURS = {"tokens": "#b3372f", "volume": "#1a7f5a"}
_HEADER = ["loss", "restored from", "moved", "fullest", "GB read", "tokens", "all back, s", "missed p50", "p99"]


def as_json(fleet: Fleet, courses: Mapping[str, Course]) -> dict[str, object]:
    """For a result file."""
    return {
        "assumed": {**asdict(fleet), "replicas": fleet.replicas},
        "peak_load_before": round(float(next(iter(courses.values())).peak_load[0]), 3),
        "losses": [
            {
                "loss": moved.loss.name,
                "restored_from": restored_from,
                "replicas_lost": len(moved.loss.replicas),
                "sessions_moved": len(moved.sessions),
                "peak_load": round(moved.peak_load, 3),
                "gigabytes_read": round(moved.bytes_read / 1e9, 1),
                "tokens_computed": moved.tokens_computed,
                "all_restored_after_s": round(float(moved.pauses_s.max(initial=0.0)), 2),
                **{f"missed_beats_p{p}": _percentile(missed_beats(fleet, moved.pauses_s), p) for p in (50, 99)},
            }
            for restored_from, course in courses.items()
            for moved in course.moved
        ],
        "late_turns_for_want_of_time": {
            name: round(float(course.late_turns.sum())) for name, course in courses.items()
        },
    }


def print_fleet(fleet: Fleet, courses: Mapping[str, Course]) -> None:
    """A table of what each loss did."""
    fullest = next(iter(courses.values())).peak_load[0]
    print(f"\n{fleet.sessions:,} sessions on {fleet.replicas:,} replicas, the fullest at {fullest:.0%}")
    print_table(_HEADER, [_cells(fleet, way, moved) for way, course in courses.items() for moved in course.moved])


def _cells(fleet: Fleet, restored_from: str, moved: Moved) -> list[object]:
    missed = missed_beats(fleet, moved.pauses_s)
    return [
        moved.loss.name,
        restored_from,
        f"{len(moved.sessions):,}",
        f"{moved.peak_load:.0%}",
        f"{moved.bytes_read / 1e9:,.0f}",
        f"{moved.tokens_computed:,}",
        float(moved.pauses_s.max(initial=0.0)),
        _percentile(missed, 50),
        _percentile(missed, 99),
    ]


def _percentile(values: Ints, percent: int) -> int:
    return int(np.percentile(values, percent)) if len(values) else 0


def draw(path: Path, fleet: Fleet, courses: Mapping[str, Course]) -> None:
    """Load and waiting sessions over time, and what single sessions missed."""
    figure, (load, waiting, missed) = plt.subplots(3, figsize=(8, 9), layout="constrained")
    first = next(iter(courses.values()))
    minutes = np.arange(len(first.mean_load)) / 60
    load.plot(minutes, 100 * first.peak_load, color="#2f6fb3", linewidth=1.2, label="the fullest replica")
    load.plot(minutes, 100 * first.mean_load, color="#7f7f7f", linewidth=1.2, label="the mean")
    load.axhline(100, color="grey", linewidth=0.8, linestyle="--")
    load.set(
        title=f"{fleet.sessions:,} sessions on {fleet.replicas:,} replicas, {fleet.headroom:.0%} headroom",
        ylabel="load, % of what is on time",
        ylim=(0, None),
    )
    for moved in first.moved:
        at = moved.loss.at_s / 60
        load.annotate(moved.loss.name, (at, 4), rotation=90, ha="right", va="bottom", fontsize=8)
        for axes in (load, waiting):
            axes.axvline(at, color="grey", linewidth=0.6, linestyle=":")
    for (restored_from, course), style in zip(courses.items(), ("-", "--"), strict=True):
        colour = _COLOURS[restored_from]
        waiting.plot(minutes, course.waiting, style, color=colour, linewidth=1.2, label=f"from {restored_from}")
        for moved, width in zip(course.moved, (0.8, 1.4, 2.2), strict=True):
            pauses_s = np.sort(moved.pauses_s)
            shares = np.arange(1, len(pauses_s) + 1) / max(1, len(pauses_s))
            label = f"{moved.loss.name}, from {restored_from}"
            missed.plot(pauses_s / fleet.beat_s, 100 * shares, style, color=colour, linewidth=width, label=label)
    waiting.set(xlabel="minutes", ylabel="sessions that wait", yscale="symlog", ylim=(0, None))
    missed.set(xlabel="beats that a moved session misses", ylabel="of those moved, %", xscale="log", ylim=(0, 102))
    missed.xaxis.set_major_formatter("{x:g}")
    for axes in (load, waiting):
        axes.legend(frameon=False, fontsize=8)
    missed.legend(
        frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )  # lines are all over it
    save(figure, path)
