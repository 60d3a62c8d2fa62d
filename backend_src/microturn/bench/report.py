"""The reports of `microturn bench`: run the measurements and print them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from microturn.bench.about import about
from microturn.bench.engine import StepTimes, as_json, slopes, time_parked, time_steps
from microturn.bench.grown_sessions import GrownSessions
from microturn.bench.stepped_engine import SteppedEngine
from microturn.bench.table import print_table
from microturn.bench.trace import step_ms, trace_beat
from microturn.engine.loading import load_engine
from microturn.errors import InvalidArgument
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings
from microturn.zoo.store import resolve_model

# Tokens of a session besides its context and the appended ones: of decode steps, and the rest of a page.
_ROOM = 64


def report_engine(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs the requested measurements and prints tables.

    Returns:
        The result, for a JSON file.

    Raises:
        InvalidArgument: the model or a setting is not supported.
    """
    rows, context_lens, new_lens = arguments.rows, arguments.contexts, arguments.new
    told = about()
    engine = SteppedEngine(load_engine(_settings(arguments)))
    times, bandwidth = time_steps(engine, rows, context_lens, new_lens)
    parked = time_parked(engine, arguments.parked, min(context_lens))
    _print_steps(times, bandwidth)
    print()
    growths = slopes(times, engine.bytes_per_token, bandwidth)
    for growth in growths:
        print(
            f"a decode step of {growth.num_rows} grows by {growth.us_per_token:.2f} µs per token of context; "
            f"reading its KV takes {growth.read_us_per_token:.2f} µs: {growth.ratio:.2f} times as long"
        )
    print(
        f"beside {parked.num_parked} parked sessions a decode step takes {parked.beside_ms:.2f} ms, "
        f"without them {parked.alone_ms:.2f} ms: {parked.slowdown:+.1%}"
    )
    return {
        "about": told,
        "model": arguments.model,
        "settings": arguments.assignments,
        "read_bandwidth_bytes_per_s": round(bandwidth),
        "kv_bytes_per_token": engine.bytes_per_token,
        "steps": as_json(times),
        "slopes": [{**asdict(growth), "ratio": growth.ratio} for growth in growths],
        "parked": {**asdict(parked), "slowdown": parked.slowdown},
    }


def report_trace(arguments: argparse.Namespace) -> None:
    """Records a beat, writes the file and prints how long steps took.

    Raises:
        InvalidArgument: the model or a setting is not supported.
        OSError: the file cannot be written.
    """
    longest = arguments.context + _ROOM
    settings = replace(
        _given_settings(arguments.assignments),
        model_dir=str(resolve_model(arguments.model)),
        max_sessions=arguments.sessions,
        kv_tokens=arguments.sessions * longest,
        max_context=longest,
        share_prefixes=False,
    )
    sessions = GrownSessions(load_engine(settings))
    trace = trace_beat(sessions, arguments.sessions, arguments.context, arguments.seconds)
    trace.write(arguments.file)
    took_ms = sorted(step_ms(trace))
    middle, last = took_ms[len(took_ms) // 2], took_ms[-1]
    print(f"{len(took_ms)} steps of {arguments.sessions} sessions: median {middle:.1f} ms, longest {last:.1f}")
    print(f"written: {arguments.file} (open it at ui.perfetto.dev)")


def _given_settings(assignments: Sequence[str]) -> Settings:
    values = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidArgument(f"--set takes key=value, not '{assignment}'")
        values[name] = value
    return Settings.from_strings(values)


def _settings(arguments: argparse.Namespace) -> Settings:
    """The given settings, with room for the measured sessions."""
    settings = _given_settings(arguments.assignments)
    most_rows, longest = max(arguments.rows), max(arguments.contexts) + max(arguments.new) + _ROOM
    return replace(
        settings,
        model_dir=str(resolve_model(arguments.model)),
        max_batch_tokens=max(settings.max_batch_tokens, most_rows * max(arguments.new)),
        max_sessions=most_rows + arguments.parked,
        kv_tokens=most_rows * longest + arguments.parked * _ROOM,
        max_context=longest,
        share_prefixes=False,
        idle_timeout_s=MAX_IDLE_TIMEOUT_S,
    )


def _print_steps(times: Sequence[StepTimes], bandwidth: float) -> None:
    print(f"\nmedian ms per step; memory is read at {bandwidth / 1e9:.1f} GB/s")
    header = ["rows", "context", "new", "step", "products", "attention", "rest of layers", "around", "tokens/s", "GB/s"]
    print_table(
        header,
        [
            [
                step.num_rows,
                step.context_len,
                step.num_new,
                step.step_ms,
                step.products_ms,
                step.attention_ms,
                step.layer_rest_ms,
                step.around_ms,
                round(step.tokens_per_s),
                step.bytes_per_s / 1e9,
            ]
            for step in times
        ],
    )
