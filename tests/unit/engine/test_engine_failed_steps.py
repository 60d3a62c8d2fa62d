"""Tests of engine: steps that cannot be built or computed, once and again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from microturn.engine.in_flight_step import InFlightStep
from microturn.engine.scheduled_row import ScheduledRow
from microturn.engine.suspects import MAX_FAILURES
from microturn.model.batch import Batch, Row
from support.fake_runner import FakeDriver, expected_tokens


class Fault:
    """Rows of one session cannot be built, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session_id: object = None
        self.num_left = 0
        self.error: Exception = MemoryError("no room for a row")
        self._build = ScheduledRow.build
        monkeypatch.setattr(ScheduledRow, "build", lambda row: self._fail_or_build(row))

    def of(self, session_id: object, num_times: int) -> None:
        self.session_id, self.num_left = session_id, num_times

    def _fail_or_build(self, row: ScheduledRow) -> Row:
        if row.session.id == self.session_id and self.num_left:
            self.num_left -= 1
            raise self.error
        return self._build(row)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def driver(request: pytest.FixtureRequest) -> FakeDriver:
    return FakeDriver(is_asynchronous=request.param)


# ---- once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("no room"), AssertionError("a row of the devil")])
def test_rows_that_cannot_be_built_fail_the_turns_of_their_step_and_nobody_else(
    driver: FakeDriver, fault: Fault, error: Exception
) -> None:
    """The rows were built where nothing caught it: the engine stopped, and with it every session."""
    histories = {n: [n, *driver.turn(n, [n], start=True, max_tokens=3).token_ids] for n in range(4)}
    answers = {n: driver.post(n, [9] * 7, max_tokens=5)[0] for n in (1, 2, 3)}
    driver.steps(2)
    assert all(answer.token_ids for answer in answers.values())
    fault.error = error
    fault.of(2, 1)
    driver.run()
    for n, answer in answers.items():
        assert str(answer.error) == f"INTERNAL: the forward pass failed, nothing was appended: {error}"
        assert driver.turn(n, [8], max_tokens=3).token_ids == expected_tokens([*histories[n], 8], 3)
    assert driver.turn(0, [8], max_tokens=3).token_ids == expected_tokens([*histories[0], 8], 3)
    assert driver.engine.recorder.metrics.step_failures.total() == 1


def test_a_first_turn_whose_row_cannot_be_built_leaves_an_empty_session(driver: FakeDriver, fault: Fault) -> None:
    fault.of(1, 1)
    assert driver.turn(1, [5] * 9, start=True, max_tokens=2).code == "INTERNAL"
    assert driver.pool.num_free == 128
    assert driver.turn(1, [6], max_tokens=2).token_ids == expected_tokens([6], 2)


def test_ids_that_cannot_be_brought_to_the_next_step_fail_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(is_asynchronous=True)
    driver.turn(2, [7], start=True, max_tokens=0)
    answer, _ = driver.post(1, [5], start=True, max_tokens=9)
    with monkeypatch.context() as planted:
        planted.setattr(InFlightStep, "ids_of", lambda *_: 1 / 0)
        driver.run()
    assert answer.code == "INTERNAL"
    assert driver.turn(1, [6], max_tokens=2).token_ids == expected_tokens([6], 2)
    assert driver.turn(2, [8], max_tokens=2).token_ids == expected_tokens([7, 8], 2)


# ---- again and again -----------------------------------------------------------------------------------------------


def test_a_session_whose_steps_always_fail_is_ended_and_who_waits_in_it_is_told(
    driver: FakeDriver, fault: Fault
) -> None:
    driver.turn(1, [5], start=True, max_tokens=0)
    fault.of(1, 100)
    for _ in range(MAX_FAILURES - 1):
        assert driver.turn(1, [6], max_tokens=2).code == "INTERNAL"
    failed, waiting = (driver.post(1, [6], max_tokens=2)[0] for _ in range(2))
    driver.run()
    for answer in (failed, waiting):
        assert answer.code == "INTERNAL"
        assert "3 times in a row, and the session was closed" in str(answer.error)
    gone = driver.turn(1, [6])
    assert gone.code == "NOT_FOUND"
    assert "failed here" in str(gone.error)
    assert driver.pool.num_free == 128
    assert driver.engine.recorder.metrics.sessions_ended.values["failed",] == 1
    fault.of(1, 0)
    assert driver.turn(1, [7], start=True, max_tokens=2).token_ids == expected_tokens([7], 2)


def test_a_step_that_succeeds_between_failures_keeps_the_session(driver: FakeDriver, fault: Fault) -> None:
    history = [5]
    driver.turn(1, [5], start=True, max_tokens=0)
    for _ in range(2 * MAX_FAILURES):
        fault.of(1, MAX_FAILURES - 1)
        for _ in range(MAX_FAILURES - 1):
            assert driver.turn(1, [6], max_tokens=2).code == "INTERNAL"
        history += [6, *expected_tokens([*history, 6], 2)]
        assert driver.turn(1, [6], max_tokens=2).token_ids == history[-2:]


def poisoned(driver: FakeDriver, token_id: int) -> Callable[[Batch], Any]:
    """Passes over a token fail, whoever else is in them."""
    run = driver.runner.run

    def fail_or_run(batch: Batch) -> torch.Tensor:
        if any(token_id in row.token_ids for row in batch.rows):
            raise RuntimeError("an embedding of the devil")
        return run(batch)

    return fail_or_run


def test_those_who_were_with_it_in_failed_steps_are_not_ended_with_it(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients come again at once, each time in one step: those after the first are made one by one."""
    histories = {n: [n] for n in range(5)}
    for n in histories:
        driver.turn(n, [n], start=True, max_tokens=0)
    monkeypatch.setattr(driver.runner, "run", poisoned(driver, 66))
    for at in range(MAX_FAILURES):
        asked = {n: [66 if n == 3 else 8] for n in histories}
        answers = {n: driver.post(n, asked[n], max_tokens=3)[0] for n in histories}
        driver.run()
        for n in (0, 1, 2, 4):
            if at == 0:
                assert answers[n].code == "INTERNAL"
            else:
                assert answers[n].token_ids == expected_tokens([*histories[n], 8], 3)
                histories[n] += [8, *answers[n].token_ids]
        assert answers[3].code == "INTERNAL"
    assert driver.turn(3, [8]).code == "NOT_FOUND"
    assert len(driver.engine._sessions) == 4


def test_who_computes_alone_may_be_long_or_take_the_pages_of_others(fault: Fault) -> None:
    driver = FakeDriver(num_pages=16, max_context=64, max_batch_tokens=8)
    answers = {n: driver.post(n, [n] * 20, start=True, max_tokens=20)[0] for n in range(3)}
    driver.steps(2)
    fault.of(1, 1)
    driver.steps(40)
    assert answers[1].code == "INTERNAL"
    again, _ = driver.post(1, [4] * 40, max_tokens=4)
    driver.run()
    assert again.token_ids == expected_tokens([4] * 40, 4)
    for n in (0, 2):
        assert answers[n].code == "INTERNAL" or answers[n].token_ids == expected_tokens([n] * 20, 20)
