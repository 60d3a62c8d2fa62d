"""What metrics, log lines and spans take of a step: all of them on, and all off, in alternation in one server.

The server is real, and so is what it publishes to: Triton's `/metrics`, a log that is read, a collector that takes
spans. Eight sessions are always busy, each turn leaves a line and is traced, so there is more to tell than in use.
Steps are timed in the model process (`telemetry_load.py`), in phases of ten seconds: off, on, on, off, and so on.

The share is that of the mean step, on against off, of phases side by side; its standard error is over those pairs.
Medians of single steps say what a step pays on the engine's own thread. What the threads of telemetry take besides is
their processor time per second: a step cannot lose more to them than that, and it hardly depends on who else is at work
on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from load_tests.bench import telemetry_load
from load_tests.bench.results import print_table, write_result
from microturn.serve.child import running_server
from microturn.serve.options import default_model_repository

_ROOT = Path(__file__).parents[2]
_MODEL = f"""import sys

sys.path.insert(0, {str(_ROOT)!r})

from load_tests.bench.telemetry_load import begin
from microturn.hosts.triton import adapter as triton_adapter


class TritonPythonModel(triton_adapter.TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        begin(self._engine, self._reporting)
"""


def run_telemetry(model_name: str, num_phases: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model_name: a directory, or the name of an embedded model.
        num_phases: of ten seconds each; a multiple of four.
    """
    with tempfile.TemporaryDirectory() as directory, _collector() as endpoint:
        measured = _measure(model_name, num_phases, Path(directory), endpoint)
    phases = measured["phases"]
    means_ms = {
        is_on: [fmean(phase["steps_ms"]) for phase in phases if phase["is_on"] is is_on] for is_on in (False, True)
    }
    steps_ms = {
        is_on: [step_ms for phase in phases if phase["is_on"] is is_on for step_ms in phase["steps_ms"]]
        for is_on in (False, True)
    }
    shares = [(on - off) / off for off, on in zip(means_ms[False], means_ms[True], strict=True)]
    share, error = fmean(shares), stdev(shares) / len(shares) ** 0.5
    threads_share = fmean(phase["threads_s"] for phase in phases if phase["is_on"]) / telemetry_load.PHASE_S
    median_share = median(steps_ms[True]) / median(steps_ms[False]) - 1
    print(f"\n{telemetry_load.NUM_SESSIONS} busy sessions, {num_phases} phases of {telemetry_load.PHASE_S:g} s")
    print_table(
        ["telemetry", "steps", "mean of a step, ms", "median, ms"],
        [
            [name, len(steps_ms[is_on]), fmean(steps_ms[is_on]), median(steps_ms[is_on])]
            for name, is_on in (("off", False), ("on", True))
        ],
    )
    print(f"\nof the mean step: {share:+.2%} ± {error:.2%}; of the median step: {median_share:+.2%}")
    print(f"threads of telemetry: {threads_share:.2%} of a core")
    result = {
        "protocol": __doc__,
        "model": model_name,
        "num_sessions": telemetry_load.NUM_SESSIONS,
        "share_of_mean_step": share,
        "standard_error": error,
        "share_of_median_step": median_share,
        "share_of_a_core_for_threads": threads_share,
        "mean_step_ms": {"off": means_ms[False], "on": means_ms[True]},
        "median_step_ms": {"off": median(steps_ms[False]), "on": median(steps_ms[True])},
        "num_steps": {"off": len(steps_ms[False]), "on": len(steps_ms[True])},
        "metrics": measured["metrics"],
    }
    print("written:", write_result("telemetry", result))


def _measure(model_name: str, num_phases: int, directory: Path, endpoint: str) -> Any:
    repository, result = directory / "models", directory / "result.json"
    shutil.copytree(default_model_repository(), repository)
    (repository / "streaming_llm" / "1" / "model.py").write_text(_MODEL)
    os.environ |= {telemetry_load.RESULT_FILE: str(result), telemetry_load.NUM_PHASES: str(num_phases)}
    settings = ("log_turns=all", f"otlp_endpoint={endpoint}")
    patience_s = 60 + 2 * num_phases * telemetry_load.PHASE_S
    arguments = (f"--model-repository={repository}", f"--log-dir={directory}", f"--health-timeout-s={patience_s}")
    with running_server(model_name, *settings, arguments=arguments):
        deadline_s = time.monotonic() + patience_s
        while not result.exists():
            if time.monotonic() > deadline_s:
                raise SystemExit("the model process gave no result: " + (directory / "triton.log").read_text()[-2000:])
            time.sleep(0.5)
    measured = json.loads(result.read_text())
    num_lines = (directory / "triton.log").read_text().count('"logger": "microturn.turns"')
    if not num_lines:
        raise SystemExit("no turn left a line: nothing was measured")
    return measured


@contextmanager
def _collector() -> Iterator[str]:
    """Takes spans and forgets them, in a process of its own; says where."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    ours.send("how many?")
    num_spans = ours.recv()
    process.terminate()
    process.join()
    if not num_spans:
        raise SystemExit("no span arrived: nothing was measured")
    print(f"{num_spans} spans arrived")


def _collect(told: Connection) -> None:
    import threading

    num_spans = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal num_spans
            num_spans += self.rfile.read(int(self.headers["Content-Length"])).count(b'"spanId"')
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told.send(server.server_port)
    told.recv()
    told.send(num_spans)
