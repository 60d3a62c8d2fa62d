"""What was found in few words: a table, a line for each figure that something is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from load_tests.bench.gpu.card import Card
from load_tests.bench.results import print_table

Line = tuple[str, str, str]


def print_card(card: Card) -> None:
    """The roof, on one line."""
    told = {
        "read": card.read_bytes_per_s,
        "copied": card.copy_bytes_per_s,
        "from the host": card.to_device_bytes_per_s,
        "to the host": card.to_host_bytes_per_s,
    }
    print("GB/s:", ", ".join(f"{name} {bytes_per_s / 1e9:.0f}" for name, bytes_per_s in told.items()))


def print_found(shape: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """All sections of a shape."""
    lines = [line for section, result in found.items() for line in lines_of(section, result)]
    print_table([shape, "figure", "of the roof"], lines)


def lines_of(section: str, result: Mapping[str, Any]) -> Iterator[Line]:
    """What one section found: which figure, the figure, and its share of what the card's memory would allow."""
    if "error" in result:
        yield section, f"failed: {result['error'][:120]}", ""
        return
    match section.removeprefix("float8-"):
        case "memory":
            parts = ", ".join(
                f"{part} {result[f'{part}_bytes'] / 1e9:.1f}" for part in ("taken", "weight", "page", "other")
            )
            yield section, f"GB: {parts}; ready after {result['ready_s']:.0f} s; {result['attention']}", ""
        case "decode":
            for step in result["steps"]:
                yield _timed(section, "step", step)
        case "turns":
            run = result["run"]
            for part in ("first", "last"):
                what = f"{section}, {part} ten of {run['num_turns']}, {run['num_rows']} sessions"
                yield what, f"{run[f'{part}_ms']:.2f} ms a turn", f"{run[f'{part}_of_roofline']:.1%}"
            yield f"{section}, last over first", f"{run['growth_over_that_of_floors']:.3f} times that of the floors", ""
            for turn in result["turns"]:
                yield _timed(section, "turn", turn)
        case "steady":
            figure = f"p99 {result['p99_ms']:.2f} ms, {result['p99_over_p50']:.3f} times p50"
            yield f"{section}, {_at(result)}", figure, f"{result['of_roofline']:.1%}"
        case "beat":
            limit = " (all that the pool holds)" if result["is_limited_by_pool"] else ""
            yield section, f"{result['sessions_on_time']} sessions on time at {result['context_len']}{limit}", ""
            for level in result["levels"]:
                if level["num_sessions"] == result["sessions_on_time"]:
                    yield f"{section}, turns then", f"p50 {level['p50_ms']} ms, p99 {level['p99_ms']} ms", ""
        case "kernels":
            for kernel in result["kernels"][:6]:
                figure = f"{kernel['us_each']:.1f} µs each, {kernel['share']:.1%} of the time"
                yield f"{section}: {kernel['name'][:60]}", figure, ""
        case "sampling":
            for name, kind in result["kinds"].items():
                figure = f"{kind['p50_ms']:.3f} ms a step, {kind['over_greedy']:.3f} times greedy"
                yield f"{section} by {name}, {_at(result)}", figure, ""
                times = f"{kind['draw_ms']:.3f} ms, enqueued in {kind['host_ms']:.3f}"
                yield f"{section} by {name}, a draw alone", times, ""
        case "restore":
            figure = f"{result['restore_p50_ms']:.1f} ms, {result['restore_over_copy']:.2f} times the copy"
            yield f"{section} of {result['num_bytes'] / 1e9:.2f} GB", figure, ""
            yield f"{section}, on a beat", f"hidden in {result['beat']['hidden_share']:.1%} of turns", ""


def _timed(section: str, of: str, result: Mapping[str, Any]) -> Line:
    what = f"{section}, {_at(result)}"
    if "skipped" in result:
        return what, result["skipped"], ""
    return what, f"{result['p50_ms']:.3f} ms a {of}", f"{result['of_roofline']:.1%}"


def _at(result: Mapping[str, Any]) -> str:
    return f"{result['num_rows']} at {result['context_len']}"
