"""Tests of load_tests.load: real Locust against a real server, of a tiny model; and one that dies in the middle."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest

from load_tests.load.locust_run import LocustRun
from load_tests.load.thresholds import Thresholds
from microturn.serve.child import RunningServer, free_ports
from support.processes import kill_all
from support.share import model_server
from support.tiny_model_dir import write_tiny_model

# How fast is not asked here: the machine has other things to do.
NO_ERRORS = Thresholds(min_on_time=0.0)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def tiny_server(tiny_dir: str) -> Iterator[RunningServer]:
    with model_server(tiny_dir) as server:
        yield server


def num_locust_turns(out_dir: Path) -> int:
    """By Locust's own file."""
    with (out_dir / "locust_stats.csv").open() as file:
        return sum(int(row["Request Count"]) for row in csv.DictReader(file) if row["Type"] == "turn")


def holds_together(report: dict[str, Any], out_dir: Path) -> None:
    """All turns of a run without errors are in all places where turns are counted."""
    total = report["total"]
    num_turns, num_given_up = total["counts"]["turns"], total["counts"].get("given_up", 0)
    assert total["errors"] == {}
    assert total["counts"]["due"] == num_turns + num_given_up
    assert total["ms"]["turn"]["num"] == num_turns + num_given_up == num_locust_turns(out_dir)
    assert total["ms"]["first_token"]["num"] == num_turns
    assert total["counts"]["tokens"] == 4 * num_turns
    assert sum(second["num_turns"] for second in report["seconds"]) == num_turns + num_given_up
    _, status, metrics = report["agreement"]
    assert [row["source"] for row in report["agreement"]] == ["Locust", "server, status", "server, /metrics"]
    assert status["num"] == num_turns
    assert metrics["num"] == total["ms"]["every_sent"]["num"]


def test_a_steady_beat_is_measured_from_end_to_end(tiny_server: RunningServer, tmp_path: Path) -> None:
    run = LocustRun(("Beat",), 2, 8, NO_ERRORS, tmp_path)
    exit_code, report = run.against(tiny_server.address, tiny_server.metrics_url)
    assert (exit_code, report["passed"], report["missed"]) == (0, True, [])
    holds_together(report, tmp_path)
    assert report["agreement"][0]["agrees"], report["agreement"]
    assert report["total"]["counts"]["opened"] == 2
    assert max(second["num_sessions"] for second in report["seconds"]) == 2
    assert "Beat" in (tmp_path / "locust.html").read_text()


def test_what_two_workers_saw_adds_up(
    tiny_server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = LocustRun(("Beat",), 3, 8, NO_ERRORS, tmp_path, shape="ramp", num_processes=2)
    exit_code, report = run.against(tiny_server.address, tiny_server.metrics_url)
    assert (exit_code, report["missed"]) == (0, [])
    holds_together(report, tmp_path)
    assert report["agreement"][0]["agrees"], report["agreement"]
    assert report["total"]["counts"]["opened"] == 3
    assert max(second["num_users"] for second in report["seconds"]) == 3
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Who runs tests in the background has SIGINT ignored, and what they start would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_run_is_started_and_stopped_on_locusts_page(tiny_dir: str, tmp_path: Path) -> None:
    """As `make load-ui` has it, with a server of its own: start and stop on the page, look at it, Ctrl-C."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "load_tests.load", "beat", "--web-port", str(port), "--out", str(tmp_path)]
    command += ["--model", tiny_dir, "--min-on-time", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as load:
        try:
            page = LocustPage(f"http://127.0.0.1:{port}")
            page.wait_until(lambda: page.ask("/stats/requests")["state"] == "ready")
            people = {"user_count": 2, "spawn_rate": 100, "user_classes": "Beat"}
            assert page.ask("/swarm", urlencode(people).encode())["success"]
            page.wait_until(lambda: page.ask("/microturn")["total"]["counts"].get("turns", 0) >= 10)
            assert page.ask("/stop", b"")["success"]
            page.wait_until(lambda: page.ask("/stats/requests")["state"] == "stopped")
            seen = page.ask("/microturn")
            time.sleep(0.5)  # Ctrl-C hits whatever Locust is doing, also a handler that has just answered the page
            os.killpg(load.pid, signal.SIGINT)
            said, _ = load.communicate(timeout=60)
        finally:
            if load.poll() is None:
                process = psutil.Process(load.pid)
                kill_all([*process.children(recursive=True), process])
    assert load.returncode == 0, said
    assert "Traceback" not in said, said
    report = json.loads((tmp_path / "report.json").read_text())
    holds_together(report, tmp_path)
    assert seen["total"] == report["total"]
    assert report["total"]["counts"]["opened"] == 2
    assert report["server"]['microturn_sessions_ended_total{model="streaming_llm",reason="closed"}'] >= 2
    assert [name for name in report["server"] if name.startswith("microturn_sessions{")] == []  # nobody is left there


class LocustPage:
    """What Locust's page asks of Locust.

    Args:
        url: where it is, or will be.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, form: bytes | None = None) -> Any:
        with urlopen(f"{self._url}{path}", form, timeout=30) as answer:
            return json.load(answer)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):  # it is not there yet
                if condition():
                    return
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def test_a_server_that_is_killed_fails_the_run(tiny_dir: str, tmp_path: Path) -> None:
    run = LocustRun(("Beat",), 2, 9, Thresholds(min_on_time=0.0, max_errors=0.0), tmp_path)
    with model_server(tiny_dir) as server:
        with subprocess.Popen(run.command(server.address, "")) as locust:
            try:
                wait_for_requests(server.metrics_url, 10)
                psutil.Process(server.pid).kill()  # its warden ends what it leaves behind
                assert locust.wait(60) == 1
            finally:
                locust.kill()
        assert '"passed": false' in run.report_path.read_text()
        assert "UNAVAILABLE" in run.report_path.read_text()


def wait_for_requests(metrics_url: str, num: int) -> None:
    """Until Triton has seen so many."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with urlopen(metrics_url, timeout=10) as answer:
            seen = re.search(
                r'^nv_inference_request_success{model="streaming_llm".*} (\d+)', answer.read().decode(), re.M
            )
        if seen is not None and int(seen[1]) >= num:
            return
        time.sleep(0.1)
    pytest.fail(f"no {num} requests within a minute")
