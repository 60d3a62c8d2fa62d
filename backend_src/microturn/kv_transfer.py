"""Copies that may still be under way: what whoever reads, writes or hands on memory may ask of them."""

from __future__ import annotations

from typing import Final, Protocol


class Transfer(Protocol):
    """A copy between the pages of the cache and host memory."""

    def is_done(self) -> bool:
        """Whether all of it is where it belongs."""
        ...

    def wait(self) -> None:
        """Waits for that, in any thread."""
        ...

    def precede_steps(self) -> None:
        """Has every step that is handed over from now on come after it. Waits for nothing itself."""
        ...


class _Done:
    """A copy that was complete when the call returned that made it."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def precede_steps(self) -> None:
        pass


DONE: Final[Transfer] = _Done()
