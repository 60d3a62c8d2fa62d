"""How much is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Extent:
    """What sections measure; as it stands here, on a GPU.

    Attributes:
        rows: sessions at once.
        context_lens: tokens that each holds before.
        num_steps: decode steps of each kind.
        num_turns: of the turn protocol from an empty context on.
        turn_rows: sessions that take them.
        num_turns_at: turns at each number of sessions and each context.
        most_s: seconds after which a run of turns ends early.
        steady_s: how long decode steps are watched.
        steady_rows: sessions meanwhile.
        beat_context_len: tokens that each session on the beat holds before.
        beat_first_rows: sessions on the beat to begin with.
        beat_most_rows: no more are tried, though there be room.
        beat_turns: of each session at a level.
        num_away: sessions that do not all fit a small pool.
        num_in_pool: of them those that do.
        num_restored: turns of sessions whose KV is in host memory.
        num_rounds: turns of each session on a slow beat; those of the first four are not counted.
    """

    rows: Sequence[int] = (1, 4, 8, 16, 64)
    context_lens: Sequence[int] = (1024, 8192)
    num_steps: int = 128
    num_turns: int = 300
    turn_rows: int = 4
    num_turns_at: int = 10
    most_s: float = 45.0
    steady_s: float = 60.0
    steady_rows: int = 8
    beat_context_len: int = 2048
    beat_first_rows: int = 64
    beat_most_rows: int = 4096
    beat_turns: int = 25
    num_away: int = 16
    num_in_pool: int = 10
    num_restored: int = 24
    num_rounds: int = 7

    @classmethod
    def of(cls, settings: Iterable[str]) -> Self:
        """The usual extent but for these, as `steady_s=20` or `rows=8,64`.

        Raises:
            ValueError: one is no such number.
        """
        usual = asdict(cls())
        changed: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in usual:
                raise ValueError(f"'{name}' is none of {', '.join(usual)}")
            try:
                changed[name] = _number_like(usual[name], value)
            except ValueError:
                raise ValueError(f"'{value}' cannot be '{name}', which is {usual[name]} otherwise") from None
        return cls(**changed)


def _number_like(usual: Any, value: str) -> Any:
    """A number, or several, of the type of another."""
    return tuple(int(part) for part in value.split(",")) if isinstance(usual, tuple) else type(usual)(value)
