"""What a realtime session without end keeps of its context: what clients ask for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields

_USUAL_SINK_TOKENS = 4


@dataclass(frozen=True)
class Window:
    """What stays, as the wire contract names it."""

    window_tokens: int
    sink_tokens: int

    def as_json(self) -> dict[str, Any]:
        """The options of START."""
        return {"overflow": "window", "window_tokens": self.window_tokens, "sink_tokens": self.sink_tokens}


@dataclass(frozen=True)
class WindowChange:
    """What a client asks of the window; None leaves what is there.

    Attributes:
        overflow: `window`, or `error` for a session that ends with its context.
    """

    overflow: str | None = None
    window_tokens: int | None = None
    sink_tokens: int | None = None

    def applied_to(self, window: Window | None) -> Window | None:
        """The window afterwards; None where the session ends with its context.

        Raises:
            Refusal: there is no such window.
        """
        asked = {"window_tokens": self.window_tokens, "sink_tokens": self.sink_tokens}
        said = {name: value for name, value in asked.items() if value is not None}
        has_window = window is not None if self.overflow is None else self.overflow == "window"
        if not has_window and said:
            raise _refused("goes with 'overflow' of 'window' only", next(iter(said)))
        if not has_window:
            return None
        before = window or Window(0, _USUAL_SINK_TOKENS)
        after = Window(**{"window_tokens": before.window_tokens, "sink_tokens": before.sink_tokens, **said})
        if after.window_tokens < 1 or after.sink_tokens < 0:
            name = "window_tokens" if after.window_tokens < 1 else "sink_tokens"
            raise _refused("says how many tokens stay", name)
        return after


def take_window(ours: Fields) -> WindowChange:
    """What a session's `microturn` says of its window."""
    overflow = ours.take("overflow", str, None)
    if overflow not in (None, "error", "window"):
        ours.refuse("invalid_value", f"'{ours.path('overflow')}' must be 'error' or 'window'", "overflow")
        overflow = None
    return WindowChange(overflow, ours.take("window_tokens", int, None), ours.take("sink_tokens", int, None))


def _refused(message: str, name: str) -> Refusal:
    param = f"session.microturn.{name}"
    return Refusal("invalid_value", f"'{param}' {message}", param=param)
