"""`microturn plan --measure` on this machine: steps of a real engine, and what a real server of its own costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_model_dir import write_tiny_model


def test_a_machine_is_measured_and_the_measurement_can_be_planned_with_again(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "tiny")

    def plan(*arguments: str) -> str:
        command = [sys.executable, "-m", "microturn.cli", "plan", "--model", str(model_dir)]
        command += ["--context", "40", "--beat-ms", "1000", "--json", *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout

    steps = tmp_path / "steps.json"
    steps.write_text(plan("--measure", "--most-rows", "2"))
    measured = json.loads(steps.read_text())
    assert {(step["num_rows"], step["num_new"]) for step in measured["steps"]} == {(1, 1), (1, 5), (2, 1), (2, 5)}
    cost_ms = measured["serving_cost_ms"]
    assert 0 < cost_ms["turn"] < 1000
    assert min(cost_ms.values()) >= 0
    assert measured["sessions_by_time"] > 0
    again = json.loads(plan("--steps", str(steps)))
    assert again["serving_cost_ms"] == pytest.approx(cost_ms)
    assert again["sessions_by_time"] == measured["sessions_by_time"]
