"""The command line of `make load` and `make capacity`."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from load_tests.load.capacity import run_capacity
from load_tests.load.locust_run import LocustRun
from load_tests.load.plans import PLANS
from load_tests.load.run import run_load
from load_tests.load.shapes import SHAPES

_ENTRANCE = ("--tls-ca", "--tls-name", "--token-file")


def main() -> int:
    """Runs a load test, or searches the capacity; the exit code says whether all that must hold held."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.load", description=__doc__)
    parser.add_argument("what", choices=[*PLANS, "capacity"], help="a scenario, or the search for the capacity")
    parser.add_argument("--users", type=int, help="people at once; in a search the most that are tried (16)")
    parser.add_argument("--duration", type=int, default=60, help="seconds; in a search, of each step (%(default)s)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="", help="how people come and go; else all at once")
    parser.add_argument("--processes", type=int, default=1, help="of Locust (%(default)s)")
    parser.add_argument("--web-port", type=int, default=0, help="opens Locust's page on this port and waits there")
    parser.add_argument("--model", default="smollm2-135m", help="a directory or an embedded model (%(default)s)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--host", default="", help="a server that runs already; https://… is TLS; else one is started")
    parser.add_argument("--metrics-url", default="", help="of that server")
    for option in _ENTRANCE:
        parser.add_argument(option, default="", help="of that server, where it is an edge: see locust --help")
    parser.add_argument("--out", type=Path, help="folder for what is written (out/load/NAME)")
    parser.add_argument("--min-on-time", type=float, help="share of turns on time; else as the scenario says")
    parser.add_argument("--max-errors", type=float, help="share of requests that may fail; likewise")
    parser.add_argument("--max-p99-ms", type=float, help="of turns; likewise")
    given = parser.parse_args()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # a terminal that is closed leaves no server behind
    out_dir = given.out or Path("out/load") / (f"{given.what}-{given.shape}" if given.shape else given.what)
    if given.what == "capacity":
        return run_capacity(given.model, given.settings, given.users or 16, given.duration, out_dir)
    plan = PLANS[given.what]
    limits = {
        name: value
        for name in ("min_on_time", "max_errors", "max_p99_ms")
        if (value := getattr(given, name)) is not None
    }
    run = LocustRun(
        plan.people,
        given.users or plan.num_users,
        0 if given.web_port else given.duration,
        replace(plan.thresholds, **limits),
        out_dir,
        given.shape,
        given.processes,
        given.web_port,
        tuple(f"{option}={value}" for option in _ENTRANCE if (value := vars(given)[option[2:].replace("-", "_")])),
    )
    return run_load(given.what, run, given.model, given.settings, given.host, given.metrics_url)


if __name__ == "__main__":
    sys.exit(main())
