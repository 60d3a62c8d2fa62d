"""What a session's context must be, by the contract alone, given its turns and their answers.

Turns that were sent together are applied in the order in which they were sent, and each answer must be what the
contract allows: position, length, number, reason, error. Whether the tokens themselves are right is for a model to say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from support.pipelined import Pending
from support.raw import Answer


@dataclass(frozen=True)
class Transcript:
    """A context, and the positions in it that the model generated."""

    context: list[int]
    generated: list[int]


@dataclass
class Sent:
    """A turn that was sent, and what it asks for."""

    pending: Pending
    given: list[int]
    max_tokens: int
    number: int | None
    rewind_to: int | None
    interrupts: bool
    has_deadline: bool

    @property
    def is_keepalive(self) -> bool:
        asks = self.max_tokens or self.interrupts or self.rewind_to is not None or self.number is not None
        return not self.given and not asks


class ExpectedContext:
    """The context of one session as a plain list.

    Attributes:
        token_ids: the list.
        num_turns: turns that it is made of.
        last_turn: the one applied last.
        num_ends: how often a turn ended for each reason or with each error.

    Args:
        max_context: of the session.
        max_queued_turns: of the server.
    """

    def __init__(self, *, max_context: int, max_queued_turns: int) -> None:
        self.token_ids: list[int] = []
        self.num_turns = 0
        self.last_turn: Sent | None = None
        self.num_ends: Counter[str] = Counter()
        self._max_context = max_context
        self._max_queued_turns = max_queued_turns
        self._was_generated: list[bool] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def transcript(self) -> Transcript:
        """The context as it is."""
        generated = [position for position, was_generated in enumerate(self._was_generated) if was_generated]
        return Transcript(list(self.token_ids), generated)

    def apply(self, turns: list[Sent]) -> None:
        """Waits for the answers to turns that were sent together, and applies them."""
        interrupted: list[Answer] = []
        has_failed = False
        for place, turn in enumerate(turns):
            answer = turn.pending.wait()
            if answer.status is None:
                self._check_refusal(turn, answer, place, has_failed)
                has_failed = True
                continue
            self.num_ends[reason := answer.status["finish_reason"]] += 1
            self._cut(turn)
            if turn.interrupts:
                self._check_interrupted(interrupted)
            self._append(turn, answer)
            if reason == "interrupted":
                interrupted.append(answer)
            else:
                assert answer.status["context_len"] == len(self.token_ids) <= self._max_context
            assert answer.status["turn"] == self.num_turns
            self.num_turns += not turn.is_keepalive
            self.last_turn = turn
        assert interrupted == [], "interrupted by nobody"

    def room_after(self, turn: Sent) -> int:
        """Tokens that would be left after a turn; below 0 it does not fit."""
        return self._max_context - self._num_kept(turn) - len(turn.given) - turn.max_tokens

    def _num_kept(self, turn: Sent) -> int:
        """Tokens that a turn does not cut off."""
        return len(self.token_ids) if turn.rewind_to is None else min(turn.rewind_to, len(self.token_ids))

    def _cut(self, turn: Sent) -> None:
        if turn.rewind_to is not None:
            assert turn.rewind_to <= len(self.token_ids) or turn.interrupts
            del self.token_ids[turn.rewind_to :]
            del self._was_generated[turn.rewind_to :]

    def _append(self, turn: Sent, answer: Answer) -> None:
        """Appends what a turn has appended; its reason must agree with how much that is."""
        self.token_ids += turn.given
        self._was_generated += [False] * len(turn.given)
        if answer.token_ids:
            assert answer.position == len(self.token_ids)
        self.token_ids += answer.token_ids
        self._was_generated += [True] * len(answer.token_ids)
        assert answer.status is not None
        assert answer.status["usage"]["output_tokens"] == len(answer.token_ids)
        match answer.status["finish_reason"]:
            case "length":
                assert len(answer.token_ids) == turn.max_tokens > 0
            case "append":
                assert turn.max_tokens == 0
            case "deadline":
                assert turn.has_deadline
            case reason:
                assert reason == "interrupted"

    def _check_interrupted(self, interrupted: list[Answer]) -> None:
        """All whom a turn has interrupted were told the length before its own input."""
        for answer in interrupted:
            assert answer.status is not None
            assert answer.status["context_len"] == len(self.token_ids)
        interrupted.clear()

    def _check_refusal(self, turn: Sent, answer: Answer, place: int, has_failed: bool) -> None:
        """Whether a turn may have been refused so, with the context as it is now."""
        self.num_ends[code := answer.code or ""] += 1
        is_beyond_the_end = turn.rewind_to is not None and turn.rewind_to > len(self.token_ids)
        is_gap = has_failed and turn.number is not None
        allowed = {
            "CONTEXT_FULL": self.room_after(turn) < 0,
            "INVALID_ARGUMENT": not self._num_kept(turn) and not turn.given and turn.max_tokens > 0,
            "RESOURCE_EXHAUSTED": place > self._max_queued_turns,
            "FAILED_PRECONDITION": is_beyond_the_end or is_gap,
            "DEADLINE_EXCEEDED": turn.has_deadline,
        }
        assert allowed.get(code), f"{answer.error}, at {len(self.token_ids)} tokens: {turn.pending.request}"
