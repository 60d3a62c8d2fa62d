"""What a session's client hears, turn by turn: beside what it hears undisturbed, it shows what a loss has changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from microturn_client import Event, Resumed, Tokens, TurnEnd


@dataclass
class Heard:
    """All that one session has said.

    Attributes:
        answers: token ids, by turn.
        texts: the same as text.
        context_lens: after each turn that has ended.
        resumed: what befell the session, and when it was told, by the monotonic clock.
    """

    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    resumed: list[tuple[float, Resumed]] = field(default_factory=list)

    @property
    def context_len(self) -> int:
        """As of the last turn that has ended."""
        return self.context_lens[-1] if self.context_lens else 0

    def begin_turn(self) -> None:
        """What comes from now on is the answer to another turn."""
        self.answers.append([])
        self.texts.append("")

    def take(self, event: Event) -> None:
        """Takes what a turn has yielded.

        Raises:
            AssertionError: it has been told before, or is not all that the turn has generated.
        """
        match event:
            case Tokens():
                assert event.position >= self.context_len
                self.answers[-1] += event.ids
                self.texts[-1] += event.text
            case Resumed():
                self.resumed.append((time.monotonic(), event))
            case TurnEnd(status):
                assert status.usage.output_tokens == len(self.answers[-1])
                self.context_lens.append(status.context_len)

    def was_cut(self, num_heard: int, context_len: int) -> None:
        """The last answer, which has not ended, was cut behind so many tokens; its text no longer counts."""
        del self.answers[-1][num_heard:]
        self.texts[-1] = ""
        self.context_lens.append(context_len)

    def check_same(self, undisturbed: Heard) -> None:
        """Asserts that nothing was lost, doubled or said otherwise, and that no answer was said to be inexact."""
        assert self.answers == undisturbed.answers
        assert self.texts == undisturbed.texts
        assert self.context_lens == undisturbed.context_lens
        assert all(event.same_tokens for _, event in self.resumed)
