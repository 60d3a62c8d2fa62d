"""Tests of microturn.planning.step_times: the roofline against hand-made sums; what lies between measured steps."""

from __future__ import annotations

import pytest

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.planning.machine import Machine
from microturn.planning.shape import ModelShape
from microturn.planning.step_times import Interpolated, MeasuredStep, Roofline

SHAPE = ModelShape("small", 1000, 1000, 10, 0, 2, False, (LayerShape(1, 8),), num_heads=1, max_context=0, num_layers=1)


def test_a_step_reads_weights_and_the_kv_of_each_session_once() -> None:
    roofline = Roofline(Machine("m", 1e9, bandwidth=1000.0), SHAPE, "bfloat16", "bfloat16", context_len=10)
    # Ten tokens of 2 * 8 * 2 bytes per session.
    assert roofline.step_s(1, 0, 0) == pytest.approx((2000 + 320) / 1000)
    assert roofline.step_s(3, 1, 50) == pytest.approx((2000 + 4 * 320) / 1000)


def test_many_tokens_are_bound_by_computing() -> None:
    machine = Machine("m", 1e9, bandwidth=1000.0, flops=10_000.0)
    roofline = Roofline(machine, SHAPE, "bfloat16", "bfloat16", context_len=10)
    token_flops = 2 * 1000 + 4 * 8 * 10
    assert roofline.step_s(1, 0, 0) == pytest.approx(2.32)
    assert roofline.step_s(1, 1, 50) == pytest.approx(51 * token_flops / 10_000)


def test_what_is_not_reached_and_what_comes_besides() -> None:
    roofline = Roofline(
        Machine("m", 1e9, 1000.0), SHAPE, "bfloat16", "bfloat16", 10, reached=0.5, fixed_s=0.1, row_s=0.01
    )
    assert roofline.step_s(2, 0, 0) == pytest.approx((2000 + 640) / 1000 / 0.5 + 0.1 + 2 * 0.01)


def steps(*kinds: tuple[int, int, int, float]) -> list[MeasuredStep]:
    return [MeasuredStep(*kind) for kind in kinds]


def test_measured_steps_are_met_and_lines_drawn_between_them() -> None:
    times = Interpolated(
        steps((1, 100, 1, 0.010), (4, 100, 1, 0.016), (1, 100, 5, 0.020), (4, 100, 5, 0.050)), context_len=100
    )
    assert times.step_s(1, 0, 0) == pytest.approx(0.010)
    assert times.step_s(4, 0, 0) == pytest.approx(0.016)
    assert times.step_s(2, 0, 0) == pytest.approx(0.012)
    assert times.step_s(6, 0, 0) == pytest.approx(0.020)  # straight on
    assert times.step_s(0, 4, 20) == pytest.approx(0.050)
    # A step of 10 tokens, half of them appended: between decode (straight on) and append.
    assert times.step_s(5, 1, 5) == pytest.approx(0.5 * 0.028 + 0.5 * 0.030)


# Of two numbers of sessions, at 100 and at 300 tokens.
AT_100 = [(1, 100, 1, 0.010), (2, 100, 1, 0.012), (1, 100, 5, 0.020), (2, 100, 5, 0.024)]
AT_300 = [(1, 300, 1, 0.030), (2, 300, 1, 0.032), (1, 300, 5, 0.040), (2, 300, 5, 0.044)]


def test_a_context_lies_between_those_that_were_measured() -> None:
    measured = steps(*AT_100, *AT_300)
    assert Interpolated(measured, context_len=200).step_s(1, 0, 0) == pytest.approx(0.020)
    assert Interpolated(measured, context_len=400).step_s(0, 1, 5) == pytest.approx(0.050)
    assert Interpolated(measured, context_len=50).step_s(1, 0, 0) == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("kinds", "context_len"), [(AT_100, 101), ([*AT_100, *AT_300], 601), ([*AT_100, *AT_300[:1]], 101)]
)
def test_a_context_beyond_those_that_were_measured_is_refused(
    kinds: list[tuple[int, int, int, float]], context_len: int
) -> None:
    """Steps took as long as at the one that was measured, of 100 tokens: 336 sessions of 4,000 tokens, and not 27."""
    with pytest.raises(
        InvalidArgument, match=rf"which says nothing of {context_len}: .* --contexts \d00 {context_len}"
    ):
        Interpolated(steps(*kinds), context_len)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([AT_100[0], *AT_100[2:]], r"decode steps of one size were measured \(1 tokens\)"),
        (AT_100[:3], r"appends of one size were measured \(5 tokens\)"),
    ],
)
def test_one_number_of_sessions_says_nothing_of_more(kinds: list[tuple[int, int, int, float]], said: str) -> None:
    """A step of 648 sessions took as long as one of a single session."""
    with pytest.raises(InvalidArgument, match=rf"{said}.* --rows 1 16"):
        Interpolated(steps(*kinds), context_len=100)


def test_what_was_measured_several_times_counts_with_its_mean() -> None:
    """`--contexts 100 100`, or files put together: beyond such steps the line stood upright, and nobody got a plan."""
    times = Interpolated(steps(*AT_100, (1, 100, 1, 0.020), (2, 100, 5, 0.034)), context_len=100)
    assert times.step_s(1, 0, 0) == pytest.approx(0.015)
    assert times.step_s(0, 2, 10) == pytest.approx(0.029)
    assert times.step_s(0, 3, 15) == pytest.approx(0.038)


def test_steps_of_one_kind_only_say_too_little() -> None:
    with pytest.raises(InvalidArgument, match="appends"):
        Interpolated(steps((1, 100, 1, 0.01)), context_len=100)
