"""Asynchronous copies between KV pages and host memory."""

from __future__ import annotations

from typing import Final, Protocol


class Transfer(Protocol):
    """A copy between the pages of the cache and host memory."""

    def is_done(self) -> bool:
        """Whether the copy is complete."""
        ...

    def wait(self) -> None:
        """Blocks until the copy is complete; callable in any thread."""
        ...

    def precede_steps(self) -> None:
        """Makes every later step on the device wait for the copy. Does not block."""
        ...


class _Done:
    """A copy that was made synchronously."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def precede_steps(self) -> None:
        pass


DONE: Final[Transfer] = _Done()
