"""Tests of file_thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from microturn.offload.file_thread import NUM_READERS, FileThreads, Outcome, Priority
from support.tiers import Posts, wait_for_files


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def threads(posts: Posts) -> Iterator[FileThreads]:
    threads = FileThreads(posts.post)
    yield threads
    threads.close()


class Blocked:
    """Keeps a thread busy until it is let go."""

    def __init__(
        self,
        threads: FileThreads,
        told: Callable[[Outcome[None]], None] = lambda _: None,
        priority: Priority = Priority.TURN,
    ) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        threads.submit(self._work, told, priority)
        assert self._begun.wait(10)
        self.let_go = self._end.set

    def _work(self) -> None:
        self._begun.set()
        assert self._end.wait(10)


@contextmanager
def one_reader(threads: FileThreads) -> Iterator[Blocked]:
    """All threads that read are busy; one is let go when the test says so, the others at the end."""
    blocked = [Blocked(threads) for _ in range(NUM_READERS)]
    yield blocked[0]
    for other in blocked[1:]:
        other.let_go()


def noting(done: list[str], name: str) -> Callable[[], None]:
    return lambda: done.append(name)


def test_work_is_done_there_and_told_here(threads: FileThreads, posts: Posts) -> None:
    told: list[tuple[Outcome[str], str]] = []
    threads.submit(
        lambda: threading.current_thread().name,
        lambda outcome: told.append((outcome, threading.current_thread().name)),
        Priority.LATER,
    )
    wait_for_files(threads)
    assert told == []
    posts.take()
    assert told == [(Outcome(value="microturn-files-later"), threading.current_thread().name)]


def test_what_fails_is_told_and_the_thread_goes_on(threads: FileThreads, posts: Posts) -> None:
    told: list[Outcome[float]] = []
    threads.submit(lambda: 1 / 0, told.append, Priority.LATER)
    threads.submit(lambda: 1.5, told.append, Priority.LATER)
    wait_for_files(threads)
    posts.take()
    assert isinstance(told[0].error, ZeroDivisionError)
    assert told[1] == Outcome(value=1.5)


def test_turns_go_first_then_those_to_come_in_their_order(threads: FileThreads) -> None:
    done: list[str] = []
    with one_reader(threads) as blocked:
        for name, priority in [
            ("ahead 1", Priority.AHEAD),
            ("turn 1", Priority.TURN),
            ("ahead 2", Priority.AHEAD),
            ("turn 2", Priority.TURN),
        ]:
            threads.submit(noting(done, name), lambda _: None, priority)
        last = threading.Event()
        threads.submit(last.set, lambda _: None, Priority.AHEAD)
        blocked.let_go()
        assert last.wait(10)
    assert done == ["turn 1", "turn 2", "ahead 1", "ahead 2"]


def test_what_has_time_is_done_one_after_the_other_and_nobody_waits_for_it(threads: FileThreads) -> None:
    """A small file that a turn waited for came behind the write of a large one."""
    done: list[str] = []
    blocked = Blocked(threads, priority=Priority.LATER)
    for number in range(20):
        threads.submit(noting(done, f"write {number}"), lambda _: None, Priority.LATER)
    read = threading.Event()
    threads.submit(read.set, lambda _: None, Priority.TURN)
    assert read.wait(10)
    assert done == []
    blocked.let_go()
    wait_for_files(threads)
    assert done == [f"write {number}" for number in range(20)]


def test_a_file_that_hangs_holds_up_no_other(threads: FileThreads) -> None:
    blocked = Blocked(threads)
    for priority in Priority:
        done = threading.Event()
        threads.submit(done.set, lambda _: None, priority)
        assert done.wait(10), priority
    blocked.let_go()


def test_a_job_that_a_turn_waits_for_now_goes_before_the_others(threads: FileThreads) -> None:
    done: list[str] = []
    with one_reader(threads) as blocked:
        threads.submit(noting(done, "first"), lambda _: None, Priority.AHEAD)
        second = threads.submit(noting(done, "second"), lambda _: None, Priority.AHEAD)
        threads.hurry(second)
        threads.hurry(second)
        last = threading.Event()
        threads.submit(last.set, lambda _: None, Priority.AHEAD)
        blocked.let_go()
        assert last.wait(10)
    threads.hurry(second)  # it is done, and not done again
    wait_for_files(threads)
    assert done == ["second", "first"]


def test_closing_waits_for_the_present_job_and_does_no_other(posts: Posts) -> None:
    """Who is told afterwards may have closed as well: an engine that stopped while a file was read had an exception."""
    threads = FileThreads(posts.post)
    done: list[str] = []
    blocked = Blocked(threads, lambda _: done.append("told"), Priority.LATER)
    threads.submit(noting(done, "never"), lambda _: None, Priority.LATER)
    threading.Timer(0.05, blocked.let_go).start()
    threads.close()
    posts.take()
    assert done == []
    assert not any(other.name.startswith("microturn-files") for other in threading.enumerate())


@pytest.mark.parametrize("priority", [Priority.TURN, Priority.LATER])
def test_the_end_does_not_wait_for_a_file_that_hangs(posts: Posts, priority: Priority) -> None:
    threads = FileThreads(posts.post)
    done: list[str] = []
    blocked = Blocked(threads, lambda _: done.append("told"), priority)
    begun_s = time.monotonic()
    threads.close([noting(done, "last 1"), lambda: 1 / 0, noting(done, "last 2")])
    assert time.monotonic() - begun_s < 5
    assert sorted(done) == ["last 1", "last 2"], "the other threads do what is still to be done"
    blocked.let_go()
    posts.take()
    assert "told" not in done


def test_at_the_end_only_so_much_is_done_as_there_is_time(posts: Posts) -> None:
    threads = FileThreads(posts.post)
    done: list[str] = []

    def drop() -> None:
        time.sleep(0.2)
        done.append("one")

    begun_s = time.monotonic()
    threads.close([drop] * 1000)
    assert time.monotonic() - begun_s < 5
    time.sleep(0.5)
    assert 5 <= len(done) < 100
