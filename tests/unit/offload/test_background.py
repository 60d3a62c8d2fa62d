"""Tests of background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from microturn.offload.background import BackgroundThreads
from microturn.offload.file_thread import Outcome

NAME = "test-background"


class Posts:
    """What is handed over to the engine's thread."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.put = self._posts.put

    def take(self) -> None:
        """Waits for one, and does it."""
        self._posts.get(timeout=10)()

    @property
    def is_empty(self) -> bool:
        return self._posts.empty()


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def background(posts: Posts) -> Iterator[BackgroundThreads]:
    background = BackgroundThreads(posts.put, name=NAME, num_threads=2)
    yield background
    background.close()


def num_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_work_is_done_there_and_told_here(posts: Posts, background: BackgroundThreads) -> None:
    told: list[Outcome[str]] = []
    background.submit(lambda: threading.current_thread().name, told.append)
    assert not told
    posts.take()
    assert told[0].value is not None
    assert told[0].value.startswith(NAME)


def test_why_work_failed_is_told(posts: Posts, background: BackgroundThreads) -> None:
    told: list[Outcome[float]] = []
    background.submit(lambda: 1 / 0, told.append)
    posts.take()
    assert isinstance(told[0].error, ZeroDivisionError)


def test_what_hangs_holds_no_other_up_and_closing_does_not_wait_for_it(
    posts: Posts, background: BackgroundThreads
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go_on.wait(10)

    told: list[Outcome[object]] = []
    background.submit(hang, told.append)
    assert begun.wait(10)
    for number in range(3):
        background.submit(lambda number=number: number, told.append)
    for _ in range(3):
        posts.take()
    assert [outcome.value for outcome in told] == [0, 1, 2]
    background.close()
    go_on.set()
    posts.take()
    assert told[-1].value is True
    background.submit(lambda: 5, told.append)
    assert posts.is_empty


def test_no_thread_begins_before_there_is_work(posts: Posts) -> None:
    name = "counted"  # threads of the other tests may still be ending
    background = BackgroundThreads(posts.put, name=name, num_threads=3)
    assert num_threads(name) == 0
    background.submit(lambda: None, lambda _: None)
    posts.take()
    assert num_threads(name) == 3
    background.close()
