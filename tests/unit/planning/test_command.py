"""Tests of `microturn plan`: what it prints of known figures and of measured steps, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from microturn.cli import main
from microturn.engine.loading import load_engine
from microturn.planning.known_shapes import read_shape
from microturn.planning.measuring import measure_steps
from microturn.settings import Settings
from support.families import write_family
from support.tiny_model_dir import write_tiny_model

GIVEN = ["--memory-gb", "8", "--bandwidth-gb-s", "10", "--context", "100"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def steps_file(path: Path, step_ms: float) -> str:
    """Steps that take as long whatever they compute."""
    kinds = [(rows, new) for rows in (1, 16) for new in (1, 5)]
    steps = [{"num_rows": rows, "context_len": 100, "num_new": new, "step_ms": step_ms} for rows, new in kinds]
    path.write_text(json.dumps({"steps": steps}))
    return str(path)


def test_sessions_by_memory_are_what_is_left_beside_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--model", "llama-3.1-8b", "--device", "h200", "--context", "4000")
    assert plan["weight_bytes"] == 16_060_522_496
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["session_bytes"] == 4000 * 131_072
    assert plan["sessions_by_memory"] == int((0.9 * 141e9 - 16_060_522_496) // (4000 * 131_072)) == 211
    assert plan["roofline_decode_ms"]["1"] == pytest.approx((15_009_849_344 + 524_288_000) / 4.8e12 * 1e3)
    assert plan["decode_ms"]["1"] == pytest.approx(plan["roofline_decode_ms"]["1"] / 0.6 + 3 + 0.03)
    assert plan["sessions"] == min(plan["sessions_by_memory"], plan["sessions_by_time"])
    assert plan["kv_tokens"] == plan["sessions"] * 4000


def test_what_limits_is_the_smaller_of_the_two(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "llama-3.2-1b", "--bandwidth-gb-s", "300"]
    by_time = planned(capsys, *small, "--memory-gb", "24")
    assert by_time["limit"] == "time"
    assert by_time["sessions"] == by_time["sessions_by_time"] > 0
    assert by_time["machine"]["name"] == "given"
    by_memory = planned(capsys, *small, "--memory-gb", "3.5")
    assert by_memory["limit"] == "memory"
    assert by_memory["sessions"] == by_memory["sessions_by_memory"] > 0
    assert by_memory["sessions_by_time"] == by_time["sessions_by_time"]


def test_a_model_that_does_not_fit_has_no_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-70b", "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert "by memory  0 sessions" in said
    assert "what limits is memory" in said
    assert "serve with" not in said


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("num_sessions", [1, 3])
def test_a_server_takes_the_settings_of_a_plan(
    family: str, num_sessions: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It refused a pool that was smaller than what the model was trained for, or than one context without windows."""
    model = str(write_family(family, tmp_path / family, max_position_embeddings=20_000))
    shape = read_shape(model)
    needs = shape.needs("bfloat16", page_size=Settings.page_size, window_slack=Settings.window_slack)
    pool_bytes = max(num_sessions * needs.session_bytes(2000), 2000 * needs.token_bytes)
    memory_gb = str((shape.weight_bytes("bfloat16") + 1.01 * pool_bytes) / 0.9 / 1e9)
    asked = ["--model", model, "--memory-gb", memory_gb, "--bandwidth-gb-s", "100", "--context", "2000"]
    plan = planned(capsys, *asked)
    assert plan["sessions"] >= num_sessions
    assert plan["max_context"] == 2000 < plan["kv_tokens"] + 1 < 20_000
    assert main(["plan", *asked]) == 0
    serve_with = capsys.readouterr().out.splitlines()[-1]
    said = {name: int(value) for name, value in re.findall(r"--set (\w+)=(\d+)", serve_with)}
    assert said == {"max_sessions": plan["sessions"], **{name: plan[name] for name in ("kv_tokens", "max_context")}}
    settings = Settings(model_dir=model, weights="float32", kv_dtype="bfloat16", attention="torch", **said)
    assert load_engine(settings).environment.max_context == 2000


def test_max_context_is_left_out_where_the_pool_holds_all_that_the_model_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert planned(capsys, "--model", "smollm2-135m", "--device", "h200", "--context", "4000")["max_context"] == 0
    assert main(["plan", "--model", "smollm2-135m", "--device", "h200", "--context", "4000"]) == 0
    assert "max_context" not in capsys.readouterr().out


def test_measured_steps_take_the_place_of_the_roofline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = [*GIVEN, "--turn-ms", "0"]
    # Four steps of 45 ms are 180: who comes while one runs waits for its end, and misses 200 ms.
    slow = planned(capsys, "--steps", steps_file(tmp_path / "slow.json", 45.0), *machine)
    assert slow["sessions_by_time"] == 1
    assert slow["weights"] == "int8"
    assert slow["weight_bytes"] == 135_298_560 + 4 * (28_311_552 + 35_136)
    fast = planned(capsys, "--steps", steps_file(tmp_path / "fast.json", 20.0), *machine)
    assert fast["sessions_by_time"] > slow["sessions_by_time"]
    assert fast["step_times"] == "measured: fast.json"


def test_what_serving_costs_is_as_given_else_as_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = Path(steps_file(tmp_path / "steps.json", 10.0))
    unmeasured = planned(capsys, "--steps", str(steps), *GIVEN)
    assert unmeasured["serving_cost_ms"] == pytest.approx({"turn": 2.4, "turn_hold": 0, "response_hold": 0})
    cost_ms = {"turn": 1.5, "turn_hold": 2.0, "response_hold": 0.5}
    steps.write_text(json.dumps(json.loads(steps.read_text()) | {"serving_cost_ms": cost_ms}))
    measured = planned(capsys, "--steps", str(steps), *GIVEN)
    assert measured["serving_cost_ms"] == pytest.approx(cost_ms)
    assert measured["sessions_by_time"] < unmeasured["sessions_by_time"]
    given = planned(capsys, "--steps", str(steps), *GIVEN, "--turn-hold-ms", "5")
    assert given["serving_cost_ms"] == pytest.approx(cost_ms | {"turn_hold": 5})
    steps.write_text(json.dumps(json.loads(steps.read_text()) | {"serving_cost_ms": cost_ms | {"turn": -1}}))
    assert main(["plan", "--steps", str(steps), *GIVEN]) == 1
    assert "nothing costs that" in capsys.readouterr().err


def test_the_plan_says_everything_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--device", "h200", "--phases", "random"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ["model", "weights", "KV", "machine", "roofline", "step", "around", "by memory", "by time", "so"]
    assert [line[:11].rstrip() for line in lines] == [*heads, "serve with"]
    assert "16.06 GB in memory" in lines[1]
    assert "131,072 B per token" in lines[2]


def test_steps_are_measured_on_a_real_engine(tmp_path: Path) -> None:
    steps = measure_steps(write_tiny_model(tmp_path / "tiny"), "int8", "float32", 40, num_new=5, most_rows=3)
    assert [(step.num_rows, step.num_new) for step in steps] == [(rows, new) for rows in (1, 2, 3) for new in (1, 5)]
    for step in steps:
        assert step.step_s > 0
        assert step.context_len == 40
        assert min(step.jitter) <= 1 <= max(step.jitter)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what is to serve it"),
        (["--memory-gb", "80"], "say what is to serve it"),
        (["--device", "h20"], "did you mean 'h200'"),
        (["--device", "h200", "--model", "llama-9"], "one of gemma3-270m"),
        (["--device", "h200", "--context", "9000"], "trained for 8192 tokens"),
        (["--steps", "x.json", "--measure"], "not both"),
        (["--measure", "--most-rows", "1"], "at least 2"),
        (["--measure", "--context", "8192", "--memory-gb", "8", "--bandwidth-gb-s", "9"], "--context is at most 8056"),
        (["--steps", "x.json", "--reached", "0.5"], "are the roofline's"),
        (["--steps", "no-such.json", "--memory-gb", "8", "--bandwidth-gb-s", "9"], "no-such.json has no steps"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_an_exit_code(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize(
    "wrong", [{"step_ms": -5}, {"step_ms": 0}, {"step_ms": "nan"}, {"num_rows": 0}, {"jitter": []}, {"jitter": [1, 0]}]
)
def test_steps_that_nothing_can_take_are_refused(
    wrong: dict[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With a step of less than no time the simulation never ended."""
    path = Path(steps_file(tmp_path / "steps.json", 20.0))
    steps = json.loads(path.read_text())["steps"]
    path.write_text(json.dumps({"steps": [*steps, steps[0] | wrong]}))
    assert main(["plan", "--steps", str(path), "--memory-gb", "8", "--bandwidth-gb-s", "9"]) == 1
    assert "no step takes that" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--context", "0"],
        ["--beat-ms", "-1"],
        ["--on-time", "1.5"],
        ["--memory-gb", "nan"],
        ["--fixed-ms", "-0.1"],
        ["--weights", "int4"],
        ["--devise", "h200"],
    ],
)
def test_numbers_that_are_none_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments])
    assert "usage: microturn" in capsys.readouterr().err
