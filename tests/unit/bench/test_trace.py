"""The trace of a beat: a valid file, whose spans nest and name what happened."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from microturn.bench.grown_sessions import GrownSessions
from microturn.bench.trace import Trace, step_ms, trace_beat
from microturn.cli import main
from support import models
from support.driver import Driver, model_runner
from support.tiny_model_dir import write_tiny_model


@pytest.fixture(scope="module")
def trace() -> Trace:
    runner = model_runner(models.grouped_heads(), num_pages=128, page_size=16)
    driver = Driver(runner, num_pages=128, page_size=16, max_batch_tokens=256, max_sessions=8)
    return trace_beat(GrownSessions(driver.engine), num_sessions=3, context_len=40, duration_s=0.4)


def test_every_turn_arrives_and_is_computed(trace: Trace) -> None:
    arrivals = sorted(event["name"] for event in trace.events if event["ph"] == "i")
    assert arrivals == sorted(f"turn of session {number}" for number in (1, 2, 3) for _ in range(2))
    passes = [event for event in trace.events if event["name"] == "forward pass"]
    assert len(passes) == len(step_ms(trace)) >= 2 * 4


def test_parts_lie_within_their_step_and_one_after_another(trace: Trace) -> None:
    spans = [event for event in trace.events if event["ph"] == "X"]
    steps = [span for span in spans if span["name"] == "step"]
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"]
    for name in ("launch", "commit"):
        parts = [span for span in spans if span["name"] == name]
        assert parts
        for part in parts:
            assert any(
                step["ts"] <= part["ts"] and part["ts"] + part["dur"] <= step["ts"] + step["dur"] for step in steps
            )


def test_the_command_writes_a_file_that_perfetto_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model_dir = tmp_path / "trace.json", str(write_tiny_model(tmp_path / "tiny"))
    assert main(["bench", "trace", "--model", model_dir, "--sessions", "2", "--context", "30", str(file)]) == 0
    assert "steps of 2 sessions: median" in capsys.readouterr().out
    events = json.loads(file.read_text())["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    assert {event["ph"] for event in events} >= {"X", "i", "C"}


def test_a_full_disk_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = str(write_tiny_model(tmp_path / "tiny"))
    assert main(["bench", "trace", "--model", model_dir, "--sessions", "1", "--context", "30", "/dev/full"]) == 1
    assert "No space left on device" in capsys.readouterr().err
