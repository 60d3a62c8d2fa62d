"""Tests of load_tests.load: real Locust against a real server, of a tiny model; and one that dies in the middle."""

from __future__ import annotations

import csv
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from load_tests.bench.server import RunningServer, started_server
from load_tests.load.locust_run import LocustRun
from load_tests.load.thresholds import Thresholds
from support.tiny_model_dir import write_tiny_model

# How fast is not asked here: the machine has other things to do.
NO_ERRORS = Thresholds(min_on_time=0.0)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def tiny_server(tiny_dir: str) -> Iterator[RunningServer]:
    with started_server(tiny_dir) as server:
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
    locust, status, metrics = report["agreement"]
    assert [row["source"] for row in report["agreement"]] == ["Locust", "server, status", "server, /metrics"]
    assert locust["agrees"], locust
    assert status["num"] == num_turns
    assert metrics["num"] == total["ms"]["every_sent"]["num"]


def test_a_steady_beat_is_measured_from_end_to_end(tiny_server: RunningServer, tmp_path: Path) -> None:
    run = LocustRun(("Beat",), 2, 8, NO_ERRORS, tmp_path)
    exit_code, report = run.against(tiny_server.address, tiny_server.metrics_url)
    assert (exit_code, report["passed"], report["missed"]) == (0, True, [])
    holds_together(report, tmp_path)
    assert report["total"]["counts"]["opened"] == 2
    assert max(second["num_sessions"] for second in report["seconds"]) == 2
    assert "Beat" in (tmp_path / "locust.html").read_text()


def test_what_two_workers_saw_adds_up(tiny_server: RunningServer, tmp_path: Path) -> None:
    run = LocustRun(("Beat",), 3, 8, NO_ERRORS, tmp_path, shape="ramp", num_processes=2)
    exit_code, report = run.against(tiny_server.address, tiny_server.metrics_url)
    assert (exit_code, report["missed"]) == (0, [])
    holds_together(report, tmp_path)
    assert report["total"]["counts"]["opened"] == 3
    assert max(second["num_users"] for second in report["seconds"]) == 3


def test_a_server_that_is_killed_fails_the_run(tiny_dir: str, tmp_path: Path) -> None:
    run = LocustRun(("Beat",), 2, 9, Thresholds(min_on_time=0.0, max_errors=0.0), tmp_path)
    with started_server(tiny_dir) as server:
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
