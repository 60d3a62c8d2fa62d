"""Pictures of the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import matplotlib as mpl

from load_tests.bench.beat_level import BEAT_S, Level
from load_tests.bench.results import RESULTS_DIR, percentile

mpl.use("Agg")  # there may be no screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_COLOURS = {
    "session": "#1a7f5a",
    "spaced": "#4bb37a",
    "whole": "#9ad69a",
    "prefix": "#c98a1b",
    "stateless": "#b3372f",
    "plain": "#6a5aa8",
}
_PEER_COLOURS = ("#2f6fb3", "#8c564b", "#7f7f7f", "#17a2b8")


def _colours(modes: Iterable[str]) -> dict[str, str]:
    """A colour for each mode; our own have always the same."""
    modes = list(modes)
    peers = (mode for mode in modes if mode not in _COLOURS)
    return {**_COLOURS, **dict(zip(peers, cycle(_PEER_COLOURS), strict=False))}


def draw_turns(
    name: str, runs: Mapping[str, Sequence[Mapping[int, float]]], num_sessions: int, tokens_per_turn: int
) -> Path:
    """Latency against context, a line per mode: the median of the runs.

    Args:
        name: of the file in the results folder, without its suffix.
        runs: per mode and run, milliseconds by turn number.
        num_sessions: sessions in parallel.
        tokens_per_turn: by which a context grows.

    Returns:
        The picture's path.
    """
    path = RESULTS_DIR / f"{name}.png"
    medians = {
        mode: {tokens_per_turn * turn: median(run[turn] for run in of) for turn in of[0]} for mode, of in runs.items()
    }
    title = f"{num_sessions} sessions at once, 16 tokens in and 8 out per turn"
    draw_latencies(path, medians, title, against="tokens of context")
    return path


def draw_latencies(path: Path, lines: Mapping[str, Mapping[int, float]], title: str, against: str = "turn") -> None:
    """Latency against something that grows.

    Args:
        path: of the PNG file to write.
        lines: per mode, milliseconds by what grows.
        title: of the picture.
        against: what grows.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = _colours(lines)
    for mode, latencies in lines.items():
        axes.plot(
            list(latencies),
            list(latencies.values()),
            color=colours[mode],
            label=mode,
            marker="o",
            markersize=3,
            linewidth=1.5,
        )
    axes.set(title=title, xlabel=against, ylabel="latency at the client, ms", yscale="log")
    axes.legend(frameon=False, loc="upper left")
    _label_plainly(axes)
    _frame_lightly(axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _frame_lightly(axes: Axes) -> None:
    """A faint grid, and no frame but the two axes."""
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _label_plainly(axes: Axes) -> None:
    """Labels a logarithmic axis with 1, 2, 5, 10 and so on."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _saved(figure: Figure, name: str) -> Path:
    """Writes a picture into the results folder; returns its path."""
    path = RESULTS_DIR / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_beat(name: str, levels: Mapping[str, Sequence[Sequence[Level]]], wanted_share: float) -> Path:
    """The share of turns on time and their latencies, against sessions: a line per mode, a dot per run.

    Args:
        name: of the file in the results folder, without its suffix.
        levels: per mode and number of sessions, what each run saw.
        wanted_share: that counts as success.

    Returns:
        The picture's path.
    """
    figure, (shares, latencies) = plt.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    colours = _colours(levels)
    for mode, by_sessions in levels.items():
        sessions = [runs[0].num_sessions for runs in by_sessions]
        colour = colours[mode]
        shares.plot(
            sessions,
            [100 * median(level.on_time_share for level in runs) for runs in by_sessions],
            color=colour,
            label=mode,
        )
        for runs in by_sessions:
            shares.plot(
                [level.num_sessions for level in runs], [100 * level.on_time_share for level in runs], ".", color=colour
            )
        for percent, style in ((50, "-"), (99, "--")):
            values = [median(level.percentile(percent) for level in runs) for runs in by_sessions]
            latencies.plot(sessions, values, style, color=colour, marker=".", label=f"{mode}, p{percent}")
    shares.axhline(100 * wanted_share, color="grey", linewidth=0.8)
    latencies.axhline(BEAT_S * 1e3, color="grey", linewidth=0.8)
    shares.set(title="A turn of 4 tokens in and 4 out every 200 ms", ylabel="turns on time, %", ylim=(0, 102))
    latencies.set(xlabel="sessions", ylabel="from scheduled arrival to last token, ms", yscale="log")
    _label_plainly(latencies)
    latencies.xaxis.get_major_locator().set_params(integer=True)
    for axes in (shares, latencies):
        axes.legend(frameon=False)
        _frame_lightly(axes)
    return _saved(figure, name)


def draw_soak(name: str, memory_mb: Sequence[float], num_acts: Sequence[int]) -> Path:
    """The server's memory over a soak, and what its clients did meanwhile.

    Args:
        name: of the file in the results folder, without its suffix.
        memory_mb: of all processes, once a second.
        num_acts: what the clients had done by then.

    Returns:
        The picture's path.
    """
    figure, (memory, rate) = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    minutes = [second / 60 for second in range(len(memory_mb))]
    memory.plot(minutes, memory_mb, color=_COLOURS["session"], linewidth=1.5)
    memory.set(
        title="A soak of sessions that talk, interrupt and vanish", ylabel="memory, MB", ylim=(0, 1.2 * max(memory_mb))
    )
    per_s = [(num_acts[at] - num_acts[max(0, at - 10)]) / 10 for at in range(len(num_acts))]
    rate.plot(minutes, per_s, color=_COLOURS["prefix"], linewidth=1.5)
    rate.set(xlabel="minutes", ylabel="turns and endings per second", ylim=(0, None))
    return _saved(figure, name)


def draw_endless(name: str, turn_ms: Sequence[float], memory_mb: Sequence[float], num_tokens: int) -> Path:
    """Latency and memory over a session of many turns.

    Args:
        name: of the file in the results folder, without its suffix.
        turn_ms: of each turn.
        memory_mb: of the process, every hundred turns.
        num_tokens: of each turn.

    Returns:
        The picture's path.
    """
    figure, (latency, memory) = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    bins = range(0, len(turn_ms) - 99, 100)
    for percent, colour in ((50, "session"), (99, "prefix")):
        values = [percentile(turn_ms[first : first + 100], percent) for first in bins]
        latency.plot([first + 50 for first in bins], values, color=_COLOURS[colour], label=f"p{percent}", linewidth=1.5)
    latency.set(title="One session whose window slides", ylabel="turn, ms", ylim=(0, None))
    latency.legend(frameon=False)
    memory.plot([100 * (at + 1) for at in range(len(memory_mb))], memory_mb, color=_COLOURS["session"], linewidth=1.5)
    memory.set(xlabel=f"turn ({num_tokens} tokens each)", ylabel="memory, MB", ylim=(0, 1.2 * max(memory_mb)))
    return _saved(figure, name)


def draw_parked(name: str, restore_ms: Mapping[str, Sequence[float]], bound_ms: float) -> Path:
    """How long turns waited for their KV: the share of them that had it within a time.

    Args:
        name: of the file in the results folder, without its suffix.
        restore_ms: by where the KV was, `host` and `disk`.
        bound_ms: what it may take from host memory.

    Returns:
        The picture's path.
    """
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for (place, samples), colour in zip(restore_ms.items(), ("session", "prefix"), strict=True):
        shares = [(at + 1) / len(samples) for at in range(len(samples))]
        axes.step(sorted(samples), shares, color=_COLOURS[colour], label=f"from {place}", where="post", linewidth=1.5)
    axes.axvline(bound_ms, color=_COLOURS["stateless"], label="a decode step and the copy", linestyle="--", linewidth=1)
    axes.set(
        title="Parked sessions come back", xlabel="restore, ms", ylabel="share of turns", xscale="log", ylim=(0, 1)
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    _frame_lightly(axes)
    return _saved(figure, name)


def draw_host_time(name: str, step_ms: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Path:
    """What the host takes for a decode step, before and after.

    Args:
        name: of the file in the results folder, without its suffix.
        step_ms: by side (`before`, `after`) and kind of step, milliseconds by rows of the step.

    Returns:
        The picture's path.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    bars = [
        (f"{kind}, {num_rows}", kind, num_rows) for kind, by_rows in step_ms["after"].items() for num_rows in by_rows
    ]
    for (side, of_side), colour, shift in zip(step_ms.items(), ("stateless", "session"), (-0.2, 0.2), strict=True):
        values = [of_side[kind][num_rows] for _, kind, num_rows in bars]
        of_side_bars = axes.bar(
            [at + shift for at in range(len(bars))], values, 0.38, color=_COLOURS[colour], label=side
        )
        axes.bar_label(of_side_bars, labels=[f"{value:.2g}" for value in values], fontsize=8)
    axes.set(title="Host time of a decode step, by its rows", ylabel="ms", yscale="log")
    axes.set_xticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    _label_plainly(axes)
    axes.legend(frameon=False, loc="upper left")
    _frame_lightly(axes)
    return _saved(figure, name)


def draw_client_cost(
    name: str, turn_ms: Sequence[float], memory_mb: Sequence[float], transcripts_mb: Sequence[float]
) -> Path:
    """What a turn costs in the client's process, and its memory.

    Args:
        name: of the file in the results folder, without its suffix.
        turn_ms: processor time of a turn, once a second.
        memory_mb: of the process, once a second.
        transcripts_mb: of that, what sessions keep of themselves.

    Returns:
        The picture's path.
    """
    figure, (cost, memory) = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    cost.plot([(at + 1) / 60 for at in range(len(turn_ms))], turn_ms, color=_COLOURS["session"], linewidth=1.5)
    cost.axhline(1.0, color="grey", linewidth=0.8)
    cost.set(title="The client's own share", ylabel="processor time of a turn, ms", ylim=(0, None))
    minutes = [at / 60 for at in range(len(memory_mb))]
    rest_mb = [whole - kept for whole, kept in zip(memory_mb, transcripts_mb, strict=True)]
    memory.plot(minutes, memory_mb, color=_COLOURS["session"], label="the process", linewidth=1.5)
    memory.plot(minutes, rest_mb, color=_COLOURS["prefix"], label="without transcripts", linewidth=1.5)
    memory.set(xlabel="minutes", ylabel="memory, MB", ylim=(0, 1.2 * max(memory_mb)))
    memory.legend(frameon=False, loc="lower right")
    for axes in (cost, memory):
        _frame_lightly(axes)
    return _saved(figure, name)
