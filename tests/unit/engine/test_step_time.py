"""Tests of step_time."""

from __future__ import annotations

import random

import pytest

from microturn.engine.step_time import StepTimeModel


def test_nothing_known_holds_nobody_up() -> None:
    step_time = StepTimeModel()
    assert step_time.pass_s(1000) == 0.0
    assert step_time.num_tokens_within(0.01, most=256) == 256


def test_two_passes_make_a_line() -> None:
    step_time = StepTimeModel([(1, 0.020), (256, 0.275)])
    assert step_time.pass_s(16) == pytest.approx(0.035)
    assert step_time.num_tokens_within(0.0501, most=256) == 31
    assert step_time.num_tokens_within(1.0, most=256) == 256
    assert step_time.num_tokens_within(0.001, most=256) == 0


def test_it_follows_a_machine_that_becomes_slower() -> None:
    step_time, sizes = StepTimeModel([(1, 0.020), (256, 0.275)]), random.Random(0)
    for _ in range(300):
        num_tokens = sizes.choice([1, 4, 16, 64, 256])
        step_time.observe(num_tokens, 0.040 + 0.002 * num_tokens)
    assert step_time.pass_s(1) == pytest.approx(0.042, rel=0.05)
    assert step_time.pass_s(128) == pytest.approx(0.296, rel=0.05)


def test_passes_of_one_size_move_the_line_and_leave_its_slope() -> None:
    step_time = StepTimeModel([(1, 0.020), (256, 0.275)])
    for _ in range(300):
        step_time.observe(4, 0.060)
    assert step_time.pass_s(4) == pytest.approx(0.060, rel=0.01)
    assert step_time.pass_s(104) - step_time.pass_s(4) == pytest.approx(0.100, rel=0.01)


def test_a_machine_that_stood_still_for_once_says_little() -> None:
    step_time = StepTimeModel([(1, 0.020), (256, 0.275)])
    step_time.observe(4, 30.0)
    assert step_time.pass_s(4) < 0.03


def test_noise_makes_no_pass_cheaper_than_nothing() -> None:
    step_time, noise = StepTimeModel([(1, 0.020), (256, 0.021)]), random.Random(1)
    for _ in range(500):
        step_time.observe(noise.randrange(1, 257), noise.uniform(0.001, 0.1))
        assert step_time.pass_s(1) >= 0
        assert 0 <= step_time.num_tokens_within(0.05, most=256) <= 256
