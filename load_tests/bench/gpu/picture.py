"""A picture of what was found for one shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from load_tests.bench.beat_level import BEAT_S
from load_tests.bench.gpu.beat import WANTED_SHARE

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Sections in each KV type, and how these are drawn.
_KV_TYPES = {"": ("KV as the weights", "#1a7f5a"), "float8-": ("KV in float8", "#c98a1b")}


def draw_found(shape: str, found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Decode steps against the roof, turns over a long run, sessions on the beat; what was not measured stays empty.

    Args:
        shape: its name.
        found: sections by name.
        path: of the PNG file to write.
    """
    found = {name: result for name, result in found.items() if "error" not in result}
    figure, (steps, turns, beat) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for prefix, (label, colour) in _KV_TYPES.items():
        _draw_steps(steps, found.get(f"{prefix}decode", {}), label, colour)
        _draw_turns(turns, found.get(f"{prefix}turns", {}), label, colour)
        _draw_beat(beat, found.get(f"{prefix}beat", {}), label, colour)
    steps.set(title="Decode steps", xlabel="sessions", ylabel="of the roofline, %", ylim=(0, 105))
    steps.set_xscale("log", base=2)
    steps.xaxis.set_major_formatter("{x:g}")
    turns.set(title="Turns of 16 tokens in and 8 out", xlabel="turn", ylabel="ms", ylim=(0, None))
    beat.axhline(100 * WANTED_SHARE, color="grey", linewidth=0.8)
    beat.set(
        title=f"4 in and 4 out every {BEAT_S * 1e3:.0f} ms", xlabel="sessions", ylabel="turns on time, %", ylim=(0, 102)
    )
    for axes in (steps, turns, beat):
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(*axes.get_legend_handles_labels(), frameon=False)
    figure.suptitle(f"{shape}, random weights")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_steps(axes: Axes, result: Mapping[str, Any], label: str, colour: str) -> None:
    measured = [step for step in result.get("steps", ()) if "of_roofline" in step]
    for context_len, style in zip(sorted({step["context_len"] for step in measured}), ("--", "-", ":"), strict=False):
        of = [step for step in measured if step["context_len"] == context_len]
        shares = [100 * step["of_roofline"] for step in of]
        axes.plot(
            [step["num_rows"] for step in of],
            shares,
            style,
            color=colour,
            marker=".",
            label=f"{label}, {context_len} tokens",
        )


def _draw_turns(axes: Axes, result: Mapping[str, Any], label: str, colour: str) -> None:
    if run := result.get("run"):
        numbers = range(2, 2 + len(run["ms"]))
        axes.plot(numbers, run["ms"], color=colour, linewidth=1, label=f"{run['num_rows']} sessions, {label}")
        axes.plot(numbers, run["floor_ms"], "--", color=colour, linewidth=1, label="its floor")


def _draw_beat(axes: Axes, result: Mapping[str, Any], label: str, colour: str) -> None:
    if levels := result.get("levels"):
        shares = [100 * level["on_time_share"] for level in levels]
        axes.plot([level["num_sessions"] for level in levels], shares, color=colour, marker=".", label=label)
