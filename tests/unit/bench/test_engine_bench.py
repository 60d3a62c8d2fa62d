"""Tests of microturn.bench: the steps that it times are those that it says, and its sums are right."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import PreTrainedModel

from microturn.bench.command import add_bench_arguments
from microturn.bench.engine import Parked, StepTimes, as_json, slopes, summary, time_parked, time_steps
from microturn.bench.grown_sessions import GrownSessions
from microturn.bench.report import _settings
from microturn.bench.stepped_engine import Step, SteppedEngine
from microturn.bench.stopwatch import Stopwatch
from microturn.cli import main
from microturn.errors import InvalidArgument
from support import models
from support.driver import Driver, model_runner


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    return parser.parse_args(["engine", *arguments])


def stepped(model: PreTrainedModel) -> tuple[SteppedEngine, Driver]:
    runner = model_runner(model, num_pages=128, page_size=16)
    driver = Driver(runner, num_pages=128, page_size=16, max_batch_tokens=256, max_sessions=64)
    return SteppedEngine(driver.engine), driver


def a_step(step_s: float, products_s: float, attention_s: float, layers_s: float) -> Step:
    return Step(step_s, Stopwatch(products_s, attention_s, layers_s, num_tokens=2, product_bytes=1000))


def test_what_is_not_product_or_attention_is_the_rest() -> None:
    steps = [a_step(0.010, 0.004, 0.003, 0.008), a_step(0.020, 0.005, 0.004, 0.012), a_step(0.011, 0.004, 0.003, 0.008)]
    times = summary(steps, num_rows=2, context_len=50, num_new=1, bytes_per_token=10)
    assert times.step_ms == pytest.approx(11)
    assert times.products_ms == pytest.approx(4)
    assert times.attention_ms == pytest.approx(3)
    assert times.layer_rest_ms == pytest.approx(1)
    assert times.around_ms == pytest.approx(3)
    assert times.tokens_per_s == pytest.approx(2 / 0.011)
    assert times.bytes_per_s == pytest.approx((1000 + 2 * 50 * 10) / 0.011)
    assert as_json([times])[0]["step_ms"] == 11


def test_a_slope_is_that_of_the_decode_steps_of_so_many_sessions() -> None:
    def step(num_rows: int, context_len: int, num_new: int, step_ms: float) -> StepTimes:
        return StepTimes(num_rows, context_len, num_new, step_ms, 0, 0, 0, 0, 0, 0)

    steps = [step(1, 100, 1, 20.1), step(1, 1000, 1, 21.0), step(4, 100, 1, 20.0), step(4, 600, 1, 26.0)]
    others = [step(1, 1000, 16, 70.0), step(8, 1000, 1, 70.0)]
    one, four = slopes(steps + others, bytes_per_token=5000, bandwidth=10e9)
    assert (one.num_rows, four.num_rows) == (1, 4)
    assert [one.us_per_token, four.us_per_token] == pytest.approx([1.0, 3.0])
    assert one.read_us_per_token == four.read_us_per_token == pytest.approx(0.5)
    assert [one.ratio, four.ratio] == pytest.approx([2.0, 6.0])


def test_pages_have_scales_such_as_real_ones_have() -> None:
    runner = model_runner(models.grouped_heads(), num_pages=32, kv_dtype=torch.int8)
    GrownSessions(Driver(runner, num_pages=32).engine)
    assert all((layer.scales > 0).all() and layer.elements.any() for layer in runner.kv.layers)


def test_a_slowdown_is_a_share() -> None:
    assert Parked(1000, alone_ms=20, beside_ms=21).slowdown == pytest.approx(0.05)


def test_every_kind_of_step_is_measured_and_leaves_the_sessions_as_they_were() -> None:
    engine, driver = stepped(models.grouped_heads())
    times, bandwidth = time_steps(engine, rows=[1, 3], context_lens=[40, 9], new_lens=[1, 16])
    assert bandwidth > 1e8
    kinds = [(step.context_len, step.num_rows, step.num_new) for step in times]
    assert kinds == [(context, rows, new) for context in (9, 40) for rows in (1, 3) for new in (1, 16)]
    for step in times:
        assert step.products_ms > 0
        assert step.attention_ms > 0
        assert 0 < step.around_ms < step.step_ms
    driver.engine.check_integrity()


def test_parked_sessions_are_there_while_they_are_measured_and_gone_afterwards() -> None:
    engine, driver = stepped(models.grouped_heads())
    parked = time_parked(engine, num_parked=20, context_len=9)
    assert parked.num_parked == 20
    assert parked.alone_ms > 0
    assert parked.beside_ms > 0
    driver.engine.check_integrity()


def test_a_step_of_another_size_is_no_result() -> None:
    engine, _ = stepped(models.grouped_heads())
    engine.grow([1, 2], 9)
    with pytest.raises(RuntimeError, match="a step of 256 tokens"):
        engine.append([1, 2], num_tokens=160, num_steps=1)


def test_layers_that_are_not_ours_have_no_stopwatch() -> None:
    with pytest.raises(InvalidArgument, match="no stopwatch"):
        stepped(models.layer_norms())


def test_the_engine_has_room_for_what_is_asked_for(smollm2_dir: str) -> None:
    sizes = ["--rows", "2", "8", "--contexts", "100", "500", "--new", "64", "--parked", "30"]
    settings = _settings(parsed("--model", smollm2_dir, *sizes, "--set", "kv_dtype=int8"))
    assert settings.kv_dtype == "int8"
    assert settings.max_batch_tokens == 8 * 64
    assert settings.max_sessions == 38
    assert settings.max_context >= 500 + 64
    assert settings.kv_tokens >= 8 * settings.max_context + 30 * 16
    with pytest.raises(InvalidArgument, match="key=value"):
        _settings(parsed("--set", "kv_dtype"))


@pytest.mark.parametrize("wrong", ["0", "-1", "many"])
def test_numbers_of_nothing_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "engine", f"--rows={wrong}"])
    assert "a number from 1 on" in capsys.readouterr().err
