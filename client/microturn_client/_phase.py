"""What a turn is for, and what its reader may still get.

A turn may be sent more than once: on another stream, to another server. What comes again is recognised by how much has
come before, so its reader gets each token and each character once. Its phase says what its reader may still get:

            hold: a cut that may undo it is on its way
    OPEN ◄───────────────────────────────────────────► HELD
     │            release: the cut was refused          │
     │ the answer ended, or an error                    │ the answer ended, or an error
     ▼                                                  ▼
    ENDED ◄──────────────────────────────────────► HELD_ENDED
                         hold, release

    redo: the cut has undone it ──► OPEN, or ENDED after an error

What comes while it is held is kept back. In any phase it may be besides

- *left*: its reader left, and what was handed out is all that is wanted of it;
- *settled*: a cut behind what is wanted of it was sent or is to be;
- *limited*: an interrupt said how much of it was heard, and the rest does not count.
"""

from __future__ import annotations

import enum


class Role(enum.Enum):
    """What a turn is for. Only the role of the program's turns changes, between the first two."""

    TURN = "the program's"
    SILENT = "the program's, and an interrupt came before its answer: its input is appended, and nothing generated"
    CUT = "interrupts and cuts the context, and does nothing else"
    END = "closes the session"
    PASSING = "the library's, a keep-alive or a part of a replay: it has no number and is never repeated"


class Phase(enum.Enum):
    """See above."""

    OPEN = "open"
    HELD = "held"
    HELD_ENDED = "held, and its answer ended"
    ENDED = "ended"


HELD = {Phase.OPEN: Phase.HELD, Phase.ENDED: Phase.HELD_ENDED}
RELEASED = {held: free for free, held in HELD.items()}
ENDED = {Phase.OPEN: Phase.ENDED, Phase.HELD: Phase.HELD_ENDED}
