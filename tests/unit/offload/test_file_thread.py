"""Tests of file_thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from microturn.offload.file_thread import FileThread, Outcome, Priority
from support.tiers import Posts, wait_for_files


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def thread(posts: Posts) -> Iterator[FileThread]:
    thread = FileThread(posts.post)
    yield thread
    thread.close()


class Blocked:
    """Keeps the thread busy until it is let go."""

    def __init__(self, thread: FileThread, told: Callable[[Outcome[None]], None] = lambda _: None) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        thread.submit(self._work, told, Priority.TURN)
        assert self._begun.wait(10)
        self.let_go = self._end.set

    def _work(self) -> None:
        self._begun.set()
        assert self._end.wait(10)


def noting(done: list[str], name: str) -> Callable[[], None]:
    return lambda: done.append(name)


def test_work_is_done_there_and_told_here(thread: FileThread, posts: Posts) -> None:
    told: list[tuple[Outcome[str], str]] = []
    thread.submit(
        lambda: threading.current_thread().name,
        lambda outcome: told.append((outcome, threading.current_thread().name)),
        Priority.LATER,
    )
    wait_for_files(thread)
    assert told == []
    posts.take()
    assert told == [(Outcome(value="microturn-files"), threading.current_thread().name)]


def test_what_fails_is_told_and_the_thread_goes_on(thread: FileThread, posts: Posts) -> None:
    told: list[Outcome[float]] = []
    thread.submit(lambda: 1 / 0, told.append, Priority.LATER)
    thread.submit(lambda: 1.5, told.append, Priority.LATER)
    wait_for_files(thread)
    posts.take()
    assert isinstance(told[0].error, ZeroDivisionError)
    assert told[1] == Outcome(value=1.5)


def test_turns_go_first_then_those_to_come_then_the_rest_in_their_order(thread: FileThread) -> None:
    done: list[str] = []
    blocked = Blocked(thread)
    for name, priority in [
        ("write 1", Priority.LATER),
        ("ahead", Priority.AHEAD),
        ("write 2", Priority.LATER),
        ("turn 1", Priority.TURN),
        ("turn 2", Priority.TURN),
    ]:
        thread.submit(noting(done, name), lambda _: None, priority)
    blocked.let_go()
    wait_for_files(thread)
    assert done == ["turn 1", "turn 2", "ahead", "write 1", "write 2"]


def test_a_job_that_a_turn_waits_for_now_goes_before_the_others(thread: FileThread) -> None:
    done: list[str] = []
    blocked = Blocked(thread)
    thread.submit(noting(done, "first"), lambda _: None, Priority.AHEAD)
    second = thread.submit(noting(done, "second"), lambda _: None, Priority.AHEAD)
    thread.hurry(second)
    thread.hurry(second)
    blocked.let_go()
    wait_for_files(thread)
    thread.hurry(second)  # it is done, and not done again
    wait_for_files(thread)
    assert done == ["second", "first"]


def test_closing_waits_for_the_present_job_and_does_no_other(posts: Posts) -> None:
    """Who is told afterwards may have closed as well: an engine that stopped while a file was read had an exception."""
    thread = FileThread(posts.post)
    done: list[str] = []
    blocked = Blocked(thread, lambda _: done.append("told"))
    thread.submit(noting(done, "never"), lambda _: None, Priority.TURN)
    threading.Timer(0.05, blocked.let_go).start()
    thread.close()
    posts.take()
    assert done == []
    assert not any(other.name == "microturn-files" for other in threading.enumerate())
