"""Tests of engine: a model or a codec that fails, and the engine's own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from microturn.sessions.inputs import TextInput
from microturn.sessions.results import Results
from microturn.sessions.session import Session
from microturn.text.codec import Piece
from support.driver import IdsOnly
from support.fake_runner import FakeDriver, expected_tokens
from support.threads import THREAD_NAME, ThreadedDriver, engine_threads, starting_engines

# ---- a forward pass that fails -------------------------------------------------------------------------------------


def test_a_failed_forward_pass_ends_its_turns_and_nothing_of_them_stays(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    histories = {n: [n, *driver.turn(n, [n], start=True, max_tokens=3).token_ids] for n in range(1, 5)}
    answers = {n: driver.post(n, [9] * 7, max_tokens=5)[0] for n in histories}
    driver.engine.step()
    driver.runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.ERROR):
        driver.run()
    for n, history in histories.items():
        assert str(answers[n].error) == "INTERNAL: the forward pass failed, nothing was appended: out of memory"
        later = driver.turn(n, [8], max_tokens=3)
        assert later.token_ids == expected_tokens([*history, 8], 3)
        assert later.status.context_len == len(history) + 4
    assert "a forward pass of 4 rows failed" in caplog.text


def test_a_failed_first_turn_leaves_an_empty_session() -> None:
    driver = FakeDriver()
    driver.runner.error = RuntimeError("out of memory")
    assert driver.turn(1, [5] * 9, start=True, max_tokens=2).code == "INTERNAL"
    assert driver.pool.num_free == 128
    assert driver.turn(1, [6], max_tokens=2).token_ids == expected_tokens([6], 2)


def test_sessions_outside_the_failed_pass_go_on() -> None:
    driver = FakeDriver(max_batch_tokens=8)
    first, _ = driver.post(1, [5] * 8, start=True, max_tokens=2)
    driver.clock.now_s += 1
    second, _ = driver.post(2, [6] * 8, start=True, max_tokens=2)
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert first.code == "INTERNAL"
    assert second.token_ids == expected_tokens([6] * 8, 2)


def test_turns_that_wait_behind_a_failed_one_are_answered() -> None:
    driver = FakeDriver()
    failed, _ = driver.post(1, [5], start=True, max_tokens=5)
    waiting, _ = driver.post(1, [6], max_tokens=3)
    closing, _ = driver.post(1, end=True)
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert failed.code == "INTERNAL"
    assert waiting.token_ids == expected_tokens([6], 3)
    assert closing.status.finish_reason == "closed"


def test_a_pass_that_fails_in_the_middle_of_a_long_prompt_leaves_the_kv_before_it() -> None:
    driver = FakeDriver(max_batch_tokens=8)
    history = [5] * 20
    driver.turn(1, history, start=True, max_tokens=0)
    failed, _ = driver.post(1, [6] * 40, max_tokens=3)
    for _ in range(2):
        driver.engine.step()
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert failed.code == "INTERNAL"
    later = driver.turn(1, [7], max_tokens=2)
    assert later.token_ids == expected_tokens([*history, 7], 2)
    assert later.status.usage["cached_tokens"] == 19


def test_options_that_overflow_fail_nobody_else() -> None:
    """A tiny penalty made all logits infinite, sampling failed, and with it the turns of everybody in the step."""
    driver = FakeDriver()
    extreme, _ = driver.post(
        1, range(90), start=True, max_tokens=4, temperature=1, repetition_penalty=1e-300, min_p=0.5
    )
    other, _ = driver.post(2, [6], start=True, max_tokens=4)
    driver.run()
    assert other.token_ids == expected_tokens([6], 4)
    assert len(extreme.token_ids) == 4


# ---- a codec that fails --------------------------------------------------------------------------------------------


class FragileCodec(IdsOnly):
    """Fails in one of its methods, once."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _call(self, method: str) -> None:
        if method == self._method:
            self._method = ""
            raise RuntimeError("a text of the devil")

    def append_text(self, text: str, **kwargs: Any) -> list[int]:
        self._call("append_text")
        return super().append_text(text, **kwargs)

    def begin_generation(self, stop: Any, *, shows_special: bool = False) -> None:
        self._call("begin_generation")

    def accept(self, token_id: int) -> Piece:
        self._call("accept")
        return super().accept(token_id)

    def end_generation(self) -> str:
        self._call("end_generation")
        return ""


@pytest.mark.parametrize("method", ["append_text", "begin_generation", "accept", "end_generation"])
@pytest.mark.parametrize("is_queued", [False, True])
def test_a_codec_that_fails_ends_its_turn_and_the_engine_lives_on(method: str, is_queued: bool) -> None:
    """Any exception but the forward pass's ended the engine's thread: every session hung, for ever and in silence."""
    codecs = iter([FragileCodec(method), IdsOnly()])
    driver = FakeDriver(new_codec=lambda _: next(codecs))
    driver.turn(1, [5], start=True, max_tokens=0)
    other, _ = driver.post(2, [6], start=True, max_tokens=6)
    if is_queued:
        driver.post(1, [7], max_tokens=0)
    failed, _ = driver.post(1, TextInput("\x08"), max_tokens=2)
    driver.run()
    assert failed.code == "INTERNAL"
    assert other.token_ids == expected_tokens([6], 6)
    history = [5, 7] if is_queued else [5]
    assert driver.turn(1, TextInput("\x09"), max_tokens=2).token_ids == expected_tokens([*history, 9], 2)


def test_a_codec_that_cannot_be_made_refuses_its_start_and_the_engine_lives_on() -> None:
    def new_codec(tools: object) -> IdsOnly:
        if tools:
            raise RuntimeError("a template of the devil")
        return IdsOnly()

    driver = FakeDriver(new_codec=new_codec)
    driver.turn(1, [5], start=True, max_tokens=0)
    assert driver.turn(1, [6], start=True, tools='[{"name": "clock"}]').code == "INTERNAL"
    assert driver.turn(1, [7], max_tokens=2).token_ids == expected_tokens([5, 7], 2)


# ---- the thread ----------------------------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Callable[..., ThreadedDriver]]:
    """Starts engines, and stops them after the test."""
    with starting_engines() as start:
        yield start


def test_the_thread_answers_what_is_posted_and_ends_when_told(started: Callable[..., ThreadedDriver]) -> None:
    driver = started()
    answers = {n: driver.ask(n, [n], start=True, max_tokens=5) for n in range(4)}
    for n, answer in answers.items():
        assert answer.ended.wait(10)
        assert answer.token_ids == expected_tokens([n], 5)
    assert len(engine_threads()) == 1
    driver.engine.stop()
    assert engine_threads() == []


def test_a_fault_of_the_engine_itself_ends_it_aloud(
    started: Callable[..., ThreadedDriver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ended in silence, and every client waited for ever."""
    driver = started()
    assert driver.ask(1, [5], start=True, max_tokens=1).ended.wait(10)
    monkeypatch.setattr(driver.engine._scheduler, "schedule", lambda _: 1 / 0)
    with caplog.at_level(logging.CRITICAL):
        assert driver.ask(1, [6], max_tokens=1).wait().code == "UNAVAILABLE"
        assert driver.ask(2, [6], start=True).wait().code == "UNAVAILABLE"
    assert "the engine stops" in caplog.text


def test_turns_that_came_before_the_fault_was_known_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    """What was posted during the step that failed stayed in the inbox, until somebody else happened to post."""
    driver = FakeDriver()
    late = []

    def fail(*_: object, **__: object) -> None:
        late.append(driver.post(2, [6], start=True)[0])
        raise ZeroDivisionError

    driver.engine._scheduler.schedule = fail  # type: ignore[assignment]
    answer, _ = driver.post(1, [5], start=True, max_tokens=1)
    with caplog.at_level(logging.CRITICAL):
        driver.engine.run()
    assert answer.code == late[0].code == "UNAVAILABLE"


def test_an_engine_without_turns_waits_and_still_ends_sessions_in_time(started: Callable[..., ThreadedDriver]) -> None:
    driver = started()
    assert driver.ask(1, [5] * 9, start=True, max_tokens=1, idle_timeout_s=0.05).ended.wait(10)
    until_s = time.monotonic() + 10
    while driver.pool.num_free < 128 and time.monotonic() < until_s:
        time.sleep(0.005)
    assert driver.pool.num_free == 128
    assert len(driver.runner.batches) == 1
    assert driver.ask(1, [6]).wait().code == "EXPIRED"


def test_stop_ends_what_runs_and_what_waits_with_unavailable(started: Callable[..., ThreadedDriver]) -> None:
    driver = started(num_pages=2048, max_context=8000)
    running = driver.ask(1, [5], start=True, max_tokens=5000)
    waiting = driver.ask(1, [6], max_tokens=5000)
    assert running.begun.wait(10)
    driver.engine.stop()
    assert running.wait().code == waiting.wait().code == "UNAVAILABLE"


def test_a_turn_that_was_ended_by_stop_is_not_answered_again() -> None:
    """The step that took the stop went on to a forward pass, whose token followed the turn's last answer."""
    driver = FakeDriver()
    answer, _ = driver.post(1, [5], start=True, max_tokens=50)
    driver.engine.step()
    driver.engine.stop()
    driver.engine.step()
    assert answer.code == "UNAVAILABLE"
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize("is_running", [False, True])
def test_a_turn_that_was_ended_by_stop_is_not_cancelled_as_well(is_running: bool) -> None:
    """Clients leave while the server stops: the turn's error was followed by a status, and that ended the sender."""
    driver = FakeDriver()
    posted = [driver.post(1, [5], start=start, max_tokens=50) for start in (True, False)]
    driver.engine.step()
    answer, turn = posted[0 if is_running else 1]
    driver.engine.stop()
    driver.engine.cancel(turn)
    driver.engine.step()
    assert answer.code == "UNAVAILABLE"


def test_a_turn_that_comes_after_stop_is_refused(started: Callable[..., ThreadedDriver]) -> None:
    """It was posted to an inbox that nobody reads, and its client waited for ever."""
    driver = started()
    assert driver.ask(1, [5], start=True, max_tokens=1).ended.wait(10)
    driver.engine.stop()
    late = driver.ask(1, [6], max_tokens=1)
    assert late.ended.wait(1)
    assert late.code == "UNAVAILABLE"


# ---- behind the end of a turn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["publish", "park", "on_end", "record"])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_fault_behind_the_end_of_a_turn_neither_answers_it_twice_nor_ends_the_engine(
    where: str, max_tokens: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn had been answered; its fault was then told as if it had not, which tripped an assertion: the engine
    stopped, and with it every session."""
    driver = FakeDriver(share_prefixes=True)
    lifecycle = driver.engine._lifecycle
    owner, name = {
        "publish": (lifecycle._prefixes, "publish"),
        "park": (lifecycle._sessions, "park"),
        "on_end": (driver.engine.recorder, "_turn_ended"),
        "record": (Results, "record"),
    }[where]
    other, _ = driver.post(2, [6], start=True, max_tokens=6)
    with monkeypatch.context() as planted, caplog.at_level(logging.ERROR):
        planted.setattr(owner, name, lambda *_, **__: 1 / 0)
        first, _ = driver.post(1, [5] * 20, start=True, max_tokens=max_tokens, turn=0)
        behind, _ = driver.post(1, [7], max_tokens=2)
        driver.run()
    assert "ZeroDivisionError" in caplog.text
    assert other.token_ids == expected_tokens([6], 6)
    assert first.token_ids == expected_tokens([5] * 20, max_tokens)
    history = [*[5] * 20, *first.token_ids, 7]
    assert behind.token_ids == expected_tokens(history, 2)
    later = driver.turn(1, [8], max_tokens=2)
    assert later.token_ids == expected_tokens([*history, *behind.token_ids, 8], 2)


def test_a_turn_that_cannot_be_begun_is_answered_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had left the queue and did not run yet: the engine stopped over it."""
    driver = FakeDriver()
    history = [5, *driver.turn(1, [5], start=True, max_tokens=2).token_ids]
    running, _ = driver.post(1, [6], max_tokens=2)
    waiting, _ = driver.post(1, [7], max_tokens=2)
    last, _ = driver.post(1, [8], max_tokens=2)
    begun: list[float] = []

    def fail_once(session: Any) -> None:
        begun.append(driver.clock())
        if len(begun) == 2:
            raise RuntimeError("a session of the devil")
        unpark(session)

    unpark = driver.engine._sessions.unpark
    monkeypatch.setattr(driver.engine._sessions, "unpark", fail_once)
    driver.run()
    history += [6, *running.token_ids]
    assert waiting.code == "INTERNAL"
    assert last.token_ids == expected_tokens([*history, 8], 2)


@pytest.mark.parametrize("where", ["adopt", "evict"])
def test_a_session_that_cannot_be_opened_is_not_there(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first turn was told of the fault, stayed the session's all the same, and was answered once more later."""
    driver = FakeDriver(share_prefixes=True)
    with monkeypatch.context() as planted:
        owner = driver.engine._lifecycle._prefixes if where == "adopt" else Session
        planted.setattr(owner, where, lambda *_, **__: 1 / 0)
        refused, _ = driver.post(1, [5], start=True, max_tokens=2)
        driver.engine._take_posts(block=False)
    driver.run()
    assert refused.code == "INTERNAL"
    assert refused.token_ids == []
    assert driver.turn(1, [5], max_tokens=2).code == "NOT_FOUND"


# ---- the end of the thread -----------------------------------------------------------------------------------------


def test_what_comes_while_the_engine_stops_is_done_by_its_thread_alone(
    started: Callable[..., ThreadedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`submit` worked on the inbox in Triton's thread while the engine's thread was still ending sessions."""
    driver = started(num_pages=2048, max_context=8000)
    running = driver.ask(1, [5], start=True, max_tokens=5000)
    assert running.begun.wait(10)
    is_stopping, may_stop = threading.Event(), threading.Event()
    fail_all, arrive = driver.engine._lifecycle.fail_all, driver.engine._arrive
    threads: list[str] = []

    def fail_all_slowly(error: Any) -> None:
        is_stopping.set()
        assert may_stop.wait(10)
        fail_all(error)

    def arrive_noted(turn: Any) -> None:
        threads.append(threading.current_thread().name)
        arrive(turn)

    monkeypatch.setattr(driver.engine._lifecycle, "fail_all", fail_all_slowly)
    monkeypatch.setattr(driver.engine, "_arrive", arrive_noted)
    stopper = threading.Thread(target=driver.engine.stop)
    stopper.start()
    assert is_stopping.wait(10)
    late = [driver.ask(n, [6], start=True) for n in range(5)]
    may_stop.set()
    stopper.join(10)
    assert [answer.wait().code for answer in (running, *late)] == ["UNAVAILABLE"] * 6
    assert threads == [THREAD_NAME] * 5


def test_of_many_who_come_as_the_engine_ends_each_is_answered_once(started: Callable[..., ThreadedDriver]) -> None:
    driver = started()
    answers: list[Any] = []

    def ask(first: int) -> None:
        answers.extend([driver.ask(n, [6], start=True, max_tokens=1) for n in range(first, first + 300)])

    askers = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(1, 5)]
    for asker in askers:
        asker.start()
    driver.engine.stop()
    for asker in askers:
        asker.join(10)
    assert len(answers) == 1200
    assert all(answer.wait().is_done for answer in answers)
