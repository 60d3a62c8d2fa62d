"""Micro-turns on the beat: what came since the last one is the input of the next. Knows no session and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from microturn_client._inputs import SupportsDLPack, TurnInput, host_array, is_array

# Chunks that may wait; a source that is faster waits itself.
MAX_WAITING = 64


@dataclass(frozen=True)
class Beat:
    """A micro-turn begins.

    Attributes:
        num_chunks: how many chunks of the source became its input.
        is_held_up: as many waited as may, so the source waits as well: it is faster than the turns.
        late_ms: milliseconds since the beat on which it should have begun, had the turn before been over.
    """

    num_chunks: int
    is_held_up: bool
    late_ms: float


class Coalescer:
    """Chunks that wait, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[TurnInput] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, chunk: TurnInput) -> None:
        """Adds a chunk: text, token ids, or embeddings ``[n, hidden]``."""
        self._waiting.append(host_array(chunk) if is_array(chunk) else chunk)

    def take(self) -> tuple[TurnInput, int]:
        """As many of the oldest as can be one input, as one; and how many they were.

        Raises:
            IndexError: none waits.
        """
        chunks = [self._waiting.popleft()]
        while self._waiting and _kind(self._waiting[0]) == _kind(chunks[0]):
            chunks.append(self._waiting.popleft())
        return _joined(chunks), len(chunks)


def _kind(chunk: TurnInput) -> str:
    if isinstance(chunk, str | bytes):
        return type(chunk).__name__
    return "embeds" if is_array(chunk) and host_array(chunk).dtype.kind == "f" else "ids"


def _joined(chunks: Sequence[TurnInput]) -> TurnInput:
    first = chunks[0]
    if len(chunks) == 1:
        return first
    if isinstance(first, str):
        return "".join(chunk for chunk in chunks if isinstance(chunk, str))
    if isinstance(first, bytes):
        return b"".join(chunk for chunk in chunks if isinstance(chunk, bytes))
    if _kind(first) == "embeds":
        import numpy as np

        embeds: SupportsDLPack = np.concatenate([host_array(chunk) for chunk in chunks if is_array(chunk)])
        return embeds
    return [token_id for ids in chunks if ids is not None for token_id in cast("Sequence[int]", ids)]
