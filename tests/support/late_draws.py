"""The choice of tokens as on a device of its own: what went wrong there is told when the tokens are asked for.

What takes the place of `microturn.engine.steps.draw` looks at how the real one is used, and uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from microturn.model.drawn import Drawn, Sampled
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow


def fail_late(logits: Tensor, error: Exception) -> None:
    """Has whatever is chosen from these logits fail when it is asked for."""
    logits.late_error = error  # type: ignore[attr-defined]


@dataclass
class _LateDrawn:
    drawn: Drawn
    error: Exception | None
    asked: Callable[[], None]

    @property
    def ids(self) -> Tensor:
        return self.drawn.ids

    def sampled(self) -> list[Sampled]:
        self.asked()
        if self.error is not None:
            raise self.error
        return self.drawn.sampled()


def late_draw(logits: Tensor, rows: Sequence[SamplingRow], *, asked: Callable[[], None] = lambda: None) -> _LateDrawn:
    """In place of `draw`.

    Args:
        asked: is called whenever a pass's tokens are asked for.
    """
    return _LateDrawn(draw(logits, rows), getattr(logits, "late_error", None), asked)
