"""What is known of sessions that are saved, or go elsewhere, and of the server that they go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from microturn.offload.copies import Copying
from microturn.sessions.session import Session


class Mark(NamedTuple):
    """A committed point of a session.

    Attributes:
        base_epoch: the session's; another session of that id has another.
        num_turns: that it has had.
        context_len: what they have left.
    """

    base_epoch: int
    num_turns: int
    context_len: int


@dataclass(frozen=True)
class Saving:
    """A session that is saved while it goes on.

    Attributes:
        copy: of it, of an epoch of its own.
        copying: its KV, as it begins to be copied.
        mark: of the point that is saved.
    """

    copy: Session
    copying: Copying | None
    mark: Mark


@dataclass(frozen=True)
class Held:
    """A session that is held while it is written elsewhere.

    Attributes:
        copy: of it, of an epoch of its own.
        copying: its KV, as it begins to be copied: the first share of pages is.
        epoch_before: that it had before.
    """

    copy: Session
    copying: Copying | None
    epoch_before: int


@dataclass(frozen=True)
class Load:
    """How much is on a server.

    Attributes:
        num_sessions: that live here, or are about to.
        max_sessions: that may.
        is_leaving: whether it opens no more sessions but branches, and restores none.
        free_bytes: of the KV pool.
        deadlines_met: turns with a deadline that ended in time, since the start.
        deadlines_missed: those that did not.
    """

    num_sessions: int
    max_sessions: int
    is_leaving: bool
    free_bytes: int
    deadlines_met: int
    deadlines_missed: int


def mark_of(session: Session) -> Mark:
    """Of its last committed point."""
    turn = session.running
    num_turns = session.num_turns if turn is None else turn.number
    return Mark(session.base_epoch, num_turns, session.committed_len)
