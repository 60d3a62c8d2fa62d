"""``microturn bench`` on the command line. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from microturn.bench.argument_types import count
from microturn.errors import MicroturnError


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommands of ``microturn bench``."""
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    engine = benchmarks.add_parser("engine", help="steps of the engine and their parts", allow_abbrev=False)
    _add_engine(engine)
    for name, default, what in (
        ("--rows", [1, 4, 8, 16], "sessions in a step"),
        ("--contexts", [100, 1000, 4000], "tokens that each holds"),
        ("--new", [1, 16], "tokens that each computes"),
    ):
        engine.add_argument(name, type=count, nargs="+", metavar="N", default=default, help=f"{what} (%(default)s)")
    engine.add_argument("--parked", type=count, metavar="N", default=1000, help="parked sessions (%(default)s)")
    engine.add_argument("--json", metavar="FILE", type=Path, help="write the result there too")
    engine.set_defaults(run_benchmark=_run_engine)
    trace = benchmarks.add_parser("trace", help="a second on a beat, as a file for Perfetto", allow_abbrev=False)
    _add_engine(trace)
    trace.add_argument("--sessions", type=count, metavar="N", default=6, help="sessions on the beat (%(default)s)")
    trace.add_argument("--context", type=count, metavar="N", default=400, help="tokens that each holds (%(default)s)")
    trace.add_argument("--seconds", type=count, metavar="N", default=1, help="of the recording (%(default)s)")
    trace.add_argument("file", type=Path, metavar="FILE", help="written, as JSON")
    trace.set_defaults(run_benchmark=_run_trace)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2-135m", help="a directory, a GGUF file or an embedded model (%(default)s)"
    )
    parser.add_argument(
        "--set", dest="assignments", metavar="KEY=VALUE", action="append", default=[], help="a setting of the engine"
    )


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs a benchmark and prints the result.

    Returns:
        The exit code: 1 after one line on stderr.
    """
    try:
        arguments.run_benchmark(arguments)
    except (MicroturnError, OSError) as error:
        print(f"microturn: error: {error.args[0] if isinstance(error, MicroturnError) else error}", file=sys.stderr)
        return 1
    return 0


def _run_engine(arguments: argparse.Namespace) -> None:
    from microturn.bench.report import report_engine

    result = report_engine(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print("written:", arguments.json)


def _run_trace(arguments: argparse.Namespace) -> None:
    from microturn.bench.report import report_trace

    report_trace(arguments)
