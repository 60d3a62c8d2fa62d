"""What breaks first, as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib as mpl

from load_tests.bench.results import print_table
from load_tests.fleet.fleet import Fleet
from load_tests.fleet.limits import breaks_at, judge, resources
from load_tests.load.pictures import save

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt

_COLOURS = ("#9ec5e8", "#4a90c8", "#1f4e79")
_GREEN, _RED = "#1a7f5a", "#b3372f"


def limits_as_json(fleet: Fleet) -> list[dict[str, object]]:
    """Of a fleet, for a result file."""
    return [
        {
            **asdict(one),
            "use": float(f"{one.use:.4g}"),
            "limit": float(f"{one.limit:.4g}"),
            "breaks_at_sessions": breaks_at(fleet, one.name) if one.grows else None,
        }
        for one in resources(fleet)
    ]


def print_limits(wholes: Sequence[Fleet], in_cells: Fleet) -> None:
    """Tables: use by limit of all at each size, and what breaks first.

    Args:
        wholes: fleets of one cell.
        in_cells: a fleet whose cells those are compared with.
    """
    cells = [replace(in_cells, sessions=whole.sessions) for whole in wholes]
    columns = [*wholes, cells[-1]]
    print(f"\nuse by limit; the last column in {len(cells[-1].cells)} cells")
    rows = zip(*(resources(fleet) for fleet in columns), strict=True)
    print_table(
        ["resource", *(f"{fleet.sessions:,}" for fleet in columns), "breaks at"],
        [[row[0].name, *(f"{one.ratio:.2f}" for one in row), _size(in_cells, row[0].name)] for row in rows],
    )
    print("\nwhat breaks first")
    print_table(
        ["sessions", "cells", "first", "at", "then", "at any size"],
        [_judged(fleet) for pair in zip(wholes, cells, strict=True) for fleet in pair[: len(pair[1].cells)]],
    )


def _size(fleet: Fleet, name: str) -> str:
    one = next(one for one in resources(fleet) if one.name == name)
    if not one.grows:
        return "any size" if one.is_broken else "no size"
    size = breaks_at(fleet, name)
    return "no size" if size is None else f"{size:,}"


def _judged(fleet: Fleet) -> list[object]:
    verdict = judge(fleet)
    names = [one.name for one, _ in verdict.broken]
    at = f"{verdict.broken[0][1]:,}" if names else "-"
    always = "; ".join(one.name for one in verdict.broken_always) or "-"
    then = "; ".join(names[1:]) or "-"
    return [f"{fleet.sessions:,}", len(fleet.cells), *(names[:1] or ["-"]), at, then, always]


def draw_limits(path: Path, wholes: Sequence[Fleet], in_cells: Fleet) -> None:
    """Of each resource the use by its limit, at each size of one cell and with cells; the first to break on top.

    Args:
        path: of the PNG file to write.
        wholes: fleets of one cell, at most three.
        in_cells: a fleet whose cells those are compared with, at the largest of these sizes.
    """
    largest = replace(in_cells, sessions=max(whole.sessions for whole in wholes))
    names = sorted((one.name for one in resources(largest)), key=lambda name: breaks_at(largest, name) or 10**12)
    figure, axes = plt.subplots(figsize=(9.5, 6.5), layout="constrained")
    axes.axvspan(1, 1e4, color=_RED, alpha=0.07, linewidth=0)
    axes.axvline(1, color=_RED, linewidth=1.2)
    ratios = [{one.name: one.ratio for one in resources(fleet)} for fleet in wholes]
    with_cells = {one.name: one.ratio for one in resources(largest)}
    for row, name in enumerate(names):
        values = [of_size[name] for of_size in ratios]
        axes.plot([min(values), max(values)], [row, row], color="#c8c8c8", linewidth=1.5, zorder=1)
        axes.annotate(
            f"breaks at {_size(largest, name)}",
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    rows = range(len(names))
    for fleet, of_size, colour in zip(wholes, ratios, _COLOURS[-len(wholes) :], strict=True):
        label = f"{fleet.sessions:,} sessions, one cell"
        axes.scatter([of_size[name] for name in names], rows, s=46, color=colour, label=label, zorder=2)
    num, replicas = len(largest.cells), max(len(cell) for cell in largest.cells)
    label = f"{largest.sessions:,} in {num} cells of up to {replicas} replicas"
    axes.scatter(
        [with_cells[name] for name in names], rows, s=60, marker="D", facecolor="none", edgecolor=_GREEN, linewidth=1.6,
        label=label, zorder=3,
    )  # fmt: skip
    axes.set_yticks(list(rows), names)
    axes.invert_yaxis()
    values = [ratio for of_size in [*ratios, with_cells] for ratio in of_size.values()]
    axes.set(xscale="log", xlim=(min(values) / 2, max(values) * 2), xlabel="use by limit; right of 1 it is broken")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title("What breaks first as a fleet grows; on the right at how many sessions in one cell", fontsize=11)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    save(figure, path)
