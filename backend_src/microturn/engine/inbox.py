"""What other threads post to the engine: turns, and tasks for which no step may be in flight."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from microturn.sessions.turn import Turn

Post = Turn | Callable[[], None]


class Inbox:
    """Posts in their order. `put` may be called by any thread, the rest by the engine's."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Post] = queue.SimpleQueue()
        # Taken while a step was in flight, and has to wait until none is.
        self._postponed: Post | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return self._postponed is None and self._posts.empty()

    def put(self, post: Post) -> None:
        """Posts a turn, or a task."""
        self._posts.put(post)

    def take(self, *, wait_s: float | None) -> Iterator[Post]:
        """All posts.

        Args:
            wait_s: how long to wait for the first one; None is for ever.
        """
        postponed, self._postponed = self._postponed, None
        try:
            if postponed is not None:
                yield postponed
            elif wait_s is None or wait_s > 0:
                yield self._posts.get(timeout=wait_s)
            while True:
                yield self._posts.get_nowait()
        except queue.Empty:
            return

    def take_turns(self, can_come: Callable[[Turn], bool]) -> Iterator[Turn]:
        """The turns before the first post of another kind, or the first that cannot come yet."""
        while self._postponed is None:
            try:
                post = self._posts.get_nowait()
            except queue.Empty:
                return
            if isinstance(post, Turn) and can_come(post):
                yield post
            else:
                self._postponed = post
