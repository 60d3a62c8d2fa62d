"""What a simulated fleet went through, as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
import numpy as np

from load_tests.bench.results import print_table
from load_tests.fleet.fleet import Fleet
from load_tests.fleet.placement import Ints
from load_tests.fleet.simulation import Course, Moved, missed_beats
from load_tests.load.pictures import save

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt

_COLOURS = {"tokens": "#b3372f", "volume": "#1a7f5a"}
_HEADER = ["loss", "restored from", "moved", "handed over", "fullest", "GB read", "all back, s", "missed p50", "p99"]


def as_json(fleet: Fleet, courses: Mapping[str, Course]) -> dict[str, object]:
    """For a result file."""
    cells = fleet.cells
    return {
        "assumed": {**asdict(fleet), "replicas": fleet.replicas, "cells": len(cells)},
        "peak_load_before": round(float(next(iter(courses.values())).peak_load[0]), 3),
        "losses": [
            {
                "loss": moved.loss.name,
                "restored_from": restored_from,
                "replicas_lost": len(moved.loss.replicas),
                "sessions_moved": len(moved.sessions),
                "handed_over": moved.num_handed_over,
                "peak_load": round(moved.peak_load, 3),
                "gigabytes_read": round(moved.bytes_read / 1e9, 1),
                "tokens_computed": moved.tokens_computed,
                "all_restored_after_s": round(moved.done_s, 2),
                **{f"missed_beats_p{p}": _percentile(missed_beats(fleet, moved.pauses_s), p) for p in (50, 99)},
            }
            for restored_from, course in courses.items()
            for moved in course.moved
        ],
        "rebalanced": {name: round(float(course.rebalanced.sum())) for name, course in courses.items()},
        "late_turns_for_want_of_time": {
            name: round(float(course.late_turns.sum())) for name, course in courses.items()
        },
    }


def print_fleet(fleet: Fleet, courses: Mapping[str, Course]) -> None:
    """A table of what each loss did."""
    fullest = next(iter(courses.values())).peak_load[0]
    print(f"\n{_title(fleet)}, the fullest at {fullest:.0%}")
    print_table(_HEADER, [_row(fleet, way, moved) for way, course in courses.items() for moved in course.moved])


def _title(fleet: Fleet) -> str:
    replicas = f"{fleet.sessions:,} sessions on {fleet.replicas:,} replicas"
    return replicas if len(fleet.cells) == 1 else f"{replicas} in {len(fleet.cells)} cells"


def _row(fleet: Fleet, restored_from: str, moved: Moved) -> list[object]:
    missed = missed_beats(fleet, moved.pauses_s)
    return [
        moved.loss.name,
        restored_from,
        f"{len(moved.sessions):,}",
        f"{moved.num_handed_over:,}",
        f"{moved.peak_load:.0%}",
        f"{moved.bytes_read / 1e9:,.0f}",
        moved.done_s,
        _percentile(missed, 50),
        _percentile(missed, 99),
    ]


def _percentile(values: Ints, percent: int) -> int:
    return int(np.percentile(values, percent)) if len(values) else 0


def draw(path: Path, drawn: Sequence[tuple[Fleet, Mapping[str, Course]]]) -> None:
    """Load over time; who waits once a zone is lost, and what moved sessions miss, without cells and with them."""
    figure, (load, waiting, missed) = plt.subplots(3, figsize=(8, 9.5), layout="constrained")
    fleet = drawn[0][0]
    first = next(iter(drawn[-1][1].values()))
    minutes = np.arange(len(first.mean_load)) / 60
    load.plot(minutes, 100 * first.peak_load, color="#2f6fb3", linewidth=1.2, label="the fullest replica")
    load.plot(minutes, 100 * first.mean_load, color="#7f7f7f", linewidth=1.2, label="the mean")
    load.axhline(100, color="grey", linewidth=0.8, linestyle="--")
    load.set(
        title=f"{_title(drawn[-1][0])}, {fleet.headroom:.0%} headroom",
        xlabel="minutes",
        ylabel="load, % of what is on time",
        ylim=(0, None),
    )
    for moved in first.moved:
        at = moved.loss.at_s / 60
        load.annotate(moved.loss.name, (at, 4), rotation=90, ha="right", va="bottom", fontsize=8)
        load.axvline(at, color="grey", linewidth=0.6, linestyle=":")
    for (one, courses), style in zip(drawn, ("--", "-")[-len(drawn) :], strict=True):
        cells = f", {len(one.cells)} cells" if len(one.cells) > 1 else ", one cell"
        for restored_from, course in courses.items():
            label = f"from {restored_from}{cells}"
            zone, at_s = course.moved[-1], course.moved[-1].loss.at_s
            last_s = min(len(course.waiting) - at_s, 300)
            waiting.plot(
                np.arange(last_s),
                course.waiting[at_s : at_s + last_s],
                style,
                color=_COLOURS[restored_from],
                label=label,
            )
            for moved, width in ((course.moved[0], 0.9), (zone, 2.0)):
                pauses_s = np.sort(moved.pauses_s)
                shares = np.arange(1, len(pauses_s) + 1) / max(1, len(pauses_s))
                missed.plot(
                    pauses_s / fleet.beat_s,
                    100 * shares,
                    style,
                    color=_COLOURS[restored_from],
                    linewidth=width,
                    label=f"{moved.loss.name}, {label}",
                )
    waiting.set(
        xlabel="seconds since a zone was lost",
        ylabel="sessions that wait",
        yscale="symlog",
        ylim=(0, None),
        xlim=(0, None),
    )
    missed.set(xlabel="beats that a moved session waits", ylabel="of those moved, %", xscale="log", ylim=(0, 102))
    missed.xaxis.set_major_formatter("{x:g}")
    load.legend(frameon=False, fontsize=8, loc="lower right")
    waiting.legend(frameon=False, fontsize=8, loc="upper right")
    # Lines are all over it.
    missed.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    save(figure, path)
