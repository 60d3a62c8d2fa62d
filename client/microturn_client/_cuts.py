"""Barge-in: where the context is cut, what that takes away, and what of it is said again.

A cut at P stops what runs, and takes away all that stands behind P. Inputs behind P are appended again, in their order:

    on the server    A.in │ A.out ─────── │ B.in            B, C: on the wire or done, behind the answer A
                              ▲ P
    after the cut    A.in │ A.o │ B.in │ C.in               as turns of their own

A turn that is on the wire when the cut is sent is held until the cut is confirmed, since it may be answered before.
A cut that comes before another is confirmed cuts no further on: what stands behind that one will be said again.
Where a user barges in, B and C are not answered any more. Where a user only left A, they are done anew.
"""

from __future__ import annotations

import math
from collections import deque

from microturn_client._errors import InvalidArgument
from microturn_client._events import Status
from microturn_client._heard import AT_END, end_of_handed, position_behind
from microturn_client._inputs import encode_input
from microturn_client._options import sampling_of
from microturn_client._outbox import Outbox
from microturn_client._pending_turn import PendingTurn
from microturn_client._phase import Role
from microturn_client._transcript import Transcript

# How an input was meant, which is said again with it.
_INPUT_OPTIONS = ("role", "parse_special")

# An interrupt says how much was heard of the last answer; those before it matter where that one is cut away whole.
_NUM_ANSWERS = 16


class Cuts:
    """The cuts of one session.

    Args:
        outbox: its turns without an answer.
        transcript: its turns that have ended.
    """

    def __init__(self, outbox: Outbox, transcript: Transcript) -> None:
        self._outbox = outbox
        self._transcript = transcript
        self._answers: deque[PendingTurn] = deque(maxlen=_NUM_ANSWERS)
        self._last_done: PendingTurn | None = None
        self._held: list[PendingTurn] = []
        self._is_blocked = False  # by the cut on the wire: there is never more than one

    # ---- where to cut --------------------------------------------------------------------------------------------

    def position_of(
        self, heard_tokens: int | None, heard_chars: int | None, heard_text: str | None, at: int | None
    ) -> int:
        """Where a barge-in cuts; with nothing said, behind what was handed out.

        Raises:
            InvalidArgument: more than one way to say it, or more than was handed out, or nothing was.
        """
        given = [value for value in (heard_tokens, heard_chars, heard_text, at) if value is not None]
        if len(given) > 1:
            raise InvalidArgument("say in one way how much was heard")
        turns = [*self._answers, *self._outbox]
        if at is not None:
            if self._is_in_input(at):
                raise InvalidArgument(f"at={at}: no token that was handed out ends there")
            return at
        position = None
        if given:
            position = position_behind(turns, heard_tokens=heard_tokens, heard_chars=heard_chars, heard_text=heard_text)
        return end_of_handed(turns, self._transcript) if position is None else position

    def _is_in_input(self, position: int) -> bool:
        """Whether a position may be in an input on its way: behind all that has ended, in no answer, before any cut."""
        turns = [turn for turn in self._outbox if not turn.is_passing]
        is_known = any(turn.is_cut or (turn.start is not None and turn.start <= position <= turn.end) for turn in turns)
        return bool(turns) and position > len(self._transcript) and not is_known

    # ---- cutting -------------------------------------------------------------------------------------------------

    def interrupt(self, position: int, deadline: float) -> PendingTurn:
        """A turn that cuts at a position, or at that of a cut before it; nobody is answered behind it."""
        position = min([position, *(_position_of(turn) for turn in self._outbox if turn.is_cut)])
        for turn in self._outbox:
            if not turn.is_cut and not _is_before(turn, position):
                turn.role = Role.SILENT
        return self._cut(position, deadline)

    def cut_what_was_left(self) -> None:
        """Cuts the answer that its reader has left, as soon as it is known where it begins."""
        done, turn = self._last_done, self._outbox.first_sent
        is_done_left = done is not None and done.is_left and not done.is_settled and len(done.ids) > done.num_handed
        is_turn_left = turn is not None and _is_unwanted(turn) and turn.start is not None and not turn.is_behind
        if not (is_done_left or is_turn_left):
            return
        if any(turn.is_cut for turn in self._outbox) or any(turn.is_end for turn in self._outbox.sent):
            return
        left = done if is_done_left else turn
        assert left is not None
        left.is_settled = True
        if left is turn or not any(later.num_handed for later in self._outbox):
            self._cut(left.end, math.inf)

    def must_wait(self, turn: PendingTurn) -> bool:
        """Whether a turn must not be sent yet, since something before it is going to be cut."""
        if turn.is_end:
            return False
        sent = self._outbox.sent
        if self._is_blocked or (turn.is_cut and any(earlier.is_cut for earlier in sent)):
            return True
        if turn.options.get("on_overlap") == "interrupt" and any(earlier.is_behind for earlier in sent):
            return True  # it would cut short what was handed out before
        return not turn.is_cut and any(_is_unwanted(earlier) for earlier in sent)

    def is_sent(self, cut: PendingTurn) -> None:
        """A cut is about to be sent: what is on the wire behind its position is held until it is answered."""
        position = _position_of(cut)
        self._hold(cut)
        if self._held or any(turn.is_held for turn in self._outbox) or self._transcript.behind(position):
            self._is_blocked = True

    def _cut(self, position: int, deadline: float) -> PendingTurn:
        options = {"max_tokens": 0, "on_overlap": "interrupt", "rewind_to": position}
        cut = PendingTurn(encode_input(None), options, deadline, role=Role.CUT)
        for turn in self._answers:
            assert turn.start is not None
            turn.limit_to(max(0, position - turn.start))
        for turn in self._outbox:
            if turn.is_cut and turn.number is None:
                turn.options["rewind_to"] = position  # it comes behind this one
            elif turn.start is not None and position >= turn.start:
                turn.limit_to(position - turn.start)
                turn.is_settled = True
        if not any(turn.is_cut for turn in self._outbox):
            self._hold(cut)
        self._outbox.put_first([cut])
        return cut

    def _hold(self, cut: PendingTurn) -> None:
        """Keeps back what comes for turns that were sent before a cut, and that it undoes."""
        sent, position = self._outbox.sent, _position_of(cut)
        for turn in self._outbox:
            if turn is cut or position == AT_END:  # behind the end stands nothing that could be undone
                break
            if (turn in sent or turn.number is not None) and not turn.is_cut and not _is_before(turn, position):
                turn.hold()

    # ---- how it went ---------------------------------------------------------------------------------------------

    def has_ended(self, turn: PendingTurn) -> bool:
        """Notes a turn that has ended well; says whether it counts now: one that is held does not yet."""
        if turn.is_held:
            self._held.append(turn)
            return False
        if not turn.is_passing and not turn.is_cut:
            self._last_done = turn
        if not turn.is_passing and turn.start is not None:
            self._answers.append(turn)
        return True

    def is_confirmed(self, cut: PendingTurn) -> None:
        """The server has cut: what was behind it is said again."""
        again = []
        position = _position_of(cut)
        for entry in self._transcript.behind(position):
            if entry.input_ids or entry.options or not entry.tensor.is_empty:
                turn = PendingTurn(entry.tensor, {**entry.options, "max_tokens": 0, "deadline_ms": 0})
                turn.num_undone = 1
                again.append(turn)
        is_at_end = len(self._transcript) == position
        self.forget_behind(position)
        if not self._transcript.is_placed:
            assert cut.result is not None
            self._transcript.begin_at(cut.result.context_len)
        for turn in self._held:
            # A text that became no token yet stays where nothing stood before it that was cut.
            assert turn.result is not None
            is_at_end = is_at_end and turn.result.usage.input_tokens == 0
            if is_at_end and turn.tensor.name == "text_input":
                self._add(turn, turn.result, was_to_generate=False)
                turn.has_input_there()
            turn.redo()
        if cut.number is not None:
            self._transcript.add_point(cut.number + 1)
        self._outbox.put_first([*again, *self._held])
        self._held, self._is_blocked = [], False

    def write_down(self, turn: PendingTurn) -> None:
        """Notes what a turn that has ended well has done to the context."""
        status = turn.result
        assert status is not None
        if turn.is_passing:
            return
        if status.finish_reason == "cancelled":
            self._outbox.is_void(turn)
            return
        if not turn.options.get("count_only"):
            self._write_down(turn, status)
        if turn.number is not None and not turn.is_cut:
            self._transcript.add_point(turn.number + 1)

    def _write_down(self, turn: PendingTurn, status: Status) -> None:
        rewind_to = turn.options.get("rewind_to")
        if isinstance(rewind_to, int) and not turn.is_cut:
            self.forget_behind(rewind_to)
        if not self._transcript.is_placed and status.finish_reason != "interrupted":
            usage = status.usage
            self._transcript.begin_at(status.context_len - usage.input_tokens - usage.output_tokens)
        if not turn.is_cut:
            self._add(turn, status, was_to_generate=turn.sent_options.get("max_tokens") != 0)
        # The length after an interrupt is that after its cut.
        if not turn.is_cut and status.finish_reason != "interrupted" and len(self._transcript) != status.context_len:
            self._transcript.begin_at(status.context_len)

    def _add(self, turn: PendingTurn, status: Status, *, was_to_generate: bool) -> None:
        meant = {name: turn.options[name] for name in _INPUT_OPTIONS if turn.options.get(name) is not None}
        sampling = sampling_of(turn.sent_options, turn.start)
        self._transcript.add(
            turn.tensor, meant, status, turn.ids, turn.texts, sampling=sampling, was_to_generate=was_to_generate
        )

    def is_refused(self) -> None:
        """The server has not cut: what was held for that counts."""
        done, self._held = self._held, []
        for turn in (*done, *self._outbox):
            turn.release()
            turn.role = Role.TURN if turn.role is Role.SILENT else turn.role
        self._is_blocked = False
        for turn in done:
            self.write_down(turn)

    def release(self) -> list[PendingTurn]:
        """Nobody will hear whether the server has cut: returns the turns that have ended and were held for that."""
        done, self._held = self._held, []
        self._is_blocked = False
        return done

    def is_unsent(self) -> None:
        """The server has not heard of the cut, which will be sent again: nothing waits for its answer until then."""
        self._is_blocked = False

    def forget_behind(self, position: int) -> None:
        """The context was cut back to a position."""
        self._transcript.cut(position)
        if self._last_done is not None and self._last_done.start is not None and self._last_done.start >= position:
            self._last_done = None
        for turn in list(self._answers):
            if turn.start is not None and turn.start >= position:
                self._answers.remove(turn)
            elif turn.start is not None:
                del turn.ids[position - turn.start :]

    def replan(self) -> list[PendingTurn]:
        """The turns to be done where the session was opened anew and knows its transcript.

        What a turn that interrupts would have cut off is not said at all, so there is nothing left to interrupt.
        """
        plan: list[PendingTurn] = []
        for turn in (*self.release(), *self._outbox):
            if turn.error is not None and not turn.num_handed and not turn.is_cut:
                continue
            if turn.options.get("on_overlap") == "interrupt":
                for earlier in plan:
                    if not turn.is_cut:
                        earlier.limit_to(len(earlier.ids))
                turn.options["on_overlap"] = "queue"
            if turn.is_cut:
                position = _position_of(turn)
                behind = [earlier for earlier in plan if not earlier.is_cut and not _is_before(earlier, position)]
                for earlier in behind:
                    earlier.redo()
                plan = [*(earlier for earlier in plan if earlier not in behind), turn, *behind]
            else:
                plan.append(turn)
        return plan


def _is_unwanted(turn: PendingTurn) -> bool:
    return turn.is_left and turn.generates and not turn.is_settled and not turn.is_passing and not turn.is_end


def _is_before(turn: PendingTurn, position: int) -> bool:
    """Whether a cut at a position leaves a turn's input in the context, or the turn has none."""
    return turn.is_passing or turn.is_end or (turn.start is not None and position >= turn.start)


def _position_of(cut: PendingTurn) -> int:
    position = cut.options["rewind_to"]
    assert isinstance(position, int)
    return position
