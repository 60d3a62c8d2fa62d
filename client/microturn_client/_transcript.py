"""What a session knows, as its client can tell it again: for each turn its input as it was sent, and all token ids.

    entry      start │ input │ generated │ end = start of the next

A cut is the same as on the server: entries that had ended stay whole, text without ids included; of the one that is cut
in two stays what is before. Knows no wire, and of the numbers of turns only at which points they were.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import cast

from microturn_client._answer_texts import AnswerTexts
from microturn_client._entries import EMBEDDING, PLAIN, UNKNOWN, Entries, Entry, Manner
from microturn_client._events import Status
from microturn_client._inputs import TEXT_HEADER_BYTES, InputTensor, encode_input
from microturn_client._options import MessageRole
from microturn_client._pieces import Piece, pieces_of
from microturn_client._points import Points

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TranscriptTurn:
    """One turn that has ended, as far as this client knows it.

    Attributes:
        position: absolute position of its first token.
        role: whose message its input belongs to, where the turn said so.
        text: its input as it was given, where that was text.
        input_ids: what its input became, those of the chat template included; -1 for an embedding. None where the
            server was not asked: without a recovery, unless the turn had ``return_appended_ids``.
        answer: the text of its answer, up to where it was cut.
        answer_ids: the ids of its answer, up to where it was cut.
    """

    position: int
    role: MessageRole | None
    text: str | None
    input_ids: tuple[int, ...] | None
    answer: str
    answer_ids: tuple[int, ...]


class Transcript:
    """The turns of one session that have ended.

    Attributes:
        is_complete: nothing is missing at its beginning, and the server agreed on its length.
        is_torn: an input that was not mere ids was cut in two: its ids are known, and not what a text would go on from.

    Args:
        max_bytes: what is kept at most; beyond that the older half is forgotten.
        is_windowed: a server takes no turn of the session that is longer than its window allows.
    """

    def __init__(self, max_bytes: int = 1 << 20, *, is_windowed: bool = False) -> None:
        self.is_complete = True
        self.is_torn = False
        self._max_bytes = max_bytes
        self._is_windowed = is_windowed
        self._entries = Entries()
        self._answers = AnswerTexts()
        self._points = Points()

    def __len__(self) -> int:
        """Length of the context in tokens."""
        return self._entries.end

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return self._entries.num_bytes + self._answers.num_bytes + self._points.num_bytes

    @property
    def is_placed(self) -> bool:
        """Whether it is known where in the context it begins."""
        return self.is_complete or self._entries.start > 0

    @property
    def is_replayable(self) -> bool:
        """Whether all is known that a new session must be told."""
        return self.is_complete and not self._entries.has_unknown

    def copy(self) -> Transcript:
        """An independent transcript of the same turns, for a session that numbers its own."""
        twin = Transcript(self._max_bytes, is_windowed=self._is_windowed)
        twin.is_complete, twin.is_torn, twin._entries = self.is_complete, self.is_torn, deepcopy(self._entries)
        twin._answers = deepcopy(self._answers)
        return twin

    def begin_at(self, context_len: int) -> None:
        """What came before is not known; from here on it goes on."""
        self.is_complete = context_len == 0
        self._entries = Entries(context_len)
        self._answers = AnswerTexts()
        self._points = Points()

    def add(
        self,
        tensor: InputTensor,
        options: Mapping[str, object],
        status: Status,
        output_ids: Sequence[int],
        output_texts: Sequence[str] = (),
        *,
        sampling: Mapping[str, object],
        was_to_generate: bool,
    ) -> None:
        """Adds a turn behind the others.

        Args:
            tensor: its input.
            options: how the input was meant.
            status: how it ended.
            output_ids: what was generated.
            output_texts: the text that came with each of these.
            sampling: how its tokens were chosen.
            was_to_generate: it asked for tokens.
        """
        # One that was interrupted may have waited in the queue, where its last word was held.
        was_answered = bool(output_ids) or (was_to_generate and status.finish_reason != "interrupted")
        is_settled = was_answered or (tensor.name != "text_input" and not tensor.is_empty)
        manner = Manner(options, sampling) if options or sampling else PLAIN
        input_ids, output = _input_ids(tensor, status), array("i", output_ids)
        self._answers.add(len(self) + len(input_ids), output_texts)
        self._entries.append(Entry(tensor, manner, len(self), input_ids, output, is_settled))
        while self.num_bytes > self._max_bytes and len(self._entries):
            self.is_complete = False
            self._points = Points()
            self._entries = self._entries.tail((len(self._entries) + 1) // 2)
            self._answers.drop_before(self._entries.start)

    def behind(self, position: int) -> list[Entry]:
        """The entries that a cut would remove whole."""
        entries = self._entries
        cut = entries.between(entries.num_before(position), len(entries))
        return [entry for entry in cut if entry.start >= position]

    def cut(self, position: int) -> None:
        """Forgets what is behind a position."""
        if position >= len(self):
            return
        entries = self._entries
        if position < entries.start:
            self.begin_at(position)
            return
        self._answers.cut(position)
        num_kept = entries.num_before(position)
        [torn] = entries.between(num_kept, num_kept + 1)
        entries.keep(num_kept)
        self._points.cut(num_kept)
        if torn.start < position:
            self._add_beginning(torn, position - torn.start)

    def add_point(self, next_number: int) -> None:
        """The server's session knows all of it, and its next turn has this number."""
        if self.is_complete:
            self._points.add(next_number, len(self._entries))

    def has_point(self, next_number: int) -> bool:
        """Whether a session whose next turn has this number may know a beginning of it, and can be told the rest."""
        return self.is_replayable and self._points.find(next_number) is not None

    def num_known(self, next_number: int, context_len: int) -> int | None:
        """How many of its turns a session knows that stands there; None where it knows no beginning of it."""
        num_entries = self._points.find(next_number) if self.is_replayable else None
        is_there = num_entries is not None and self._entries.end_of(num_entries) == context_len
        return num_entries if is_there else None

    def keep_points_up_to(self, next_number: int) -> None:
        """From this number on, turns get other numbers than they had."""
        self._points.keep_up_to(next_number)

    def turns(self) -> tuple[TranscriptTurn, ...]:
        """The turns, as they are told to the program."""
        return tuple(self._told(entry) for entry in self._entries)

    def _told(self, entry: Entry) -> TranscriptTurn:
        is_text = entry.tensor.name == "text_input"
        return TranscriptTurn(
            position=entry.start,
            role=cast("MessageRole | None", entry.options.get("role")),
            text=entry.tensor.data[TEXT_HEADER_BYTES:].decode(errors="replace") if is_text else None,
            input_ids=None if UNKNOWN in entry.input_ids else tuple(entry.input_ids),
            answer=self._answers.text(entry.output_start),
            answer_ids=tuple(entry.output_ids),
        )

    def ids(self, num_known: int = 0) -> array[int]:
        """The token ids behind so many turns, ``EMBEDDING`` for each embedding; of a transcript that is replayable."""
        return self._entries.ids[self._entries.end_of(num_known) - self._entries.start :]

    def as_said(self, num_known: int = 0) -> list[Piece]:
        """The turns to tell it again so that roles, half words and half characters are known as well.

        The last tokens of the last answer are generated again, since what a character begins with is known behind
        generated tokens only. Where no roles are in use, ids say all up to the last turn that left no half word.

        Args:
            num_known: so many turns need not be told. Where they left half a word, what follows is told as text.
        """
        entries = self._entries
        by_ids = not entries.has_roles and entries.is_settled(num_known)
        num_answered = max(num_known, entries.num_up_to_answer())
        num_settled = max(num_answered, entries.num_up_to_settled()) if by_ids else num_answered
        most = self._most_tokens
        return [
            *pieces_of(entries.between(num_known, num_answered), by_ids=by_ids, most=most, generates_last=True),
            *pieces_of(entries.between(num_answered, num_settled), by_ids=True, most=most),
            *pieces_of(entries.between(num_settled, len(entries)), by_ids=False, most=most),
        ]

    def as_ids(self) -> list[Piece]:
        """The turns to tell it again by its ids alone."""
        return pieces_of(self._entries, by_ids=True, most=self._most_tokens)

    @property
    def _most_tokens(self) -> float:
        """How long a turn may be that tells several: with a window so long as one that the server has taken."""
        return self._entries.longest if self._is_windowed else math.inf

    def _add_beginning(self, entry: Entry, length: int) -> None:
        """Adds the first tokens of an entry."""
        num_input = len(entry.input_ids)
        if length >= num_input:
            self._entries.append(replace(entry, output_ids=entry.output_ids[: length - num_input]))
            return
        self.is_torn = self.is_torn or entry.tensor.name == "text_input" or bool(entry.options)
        kept = entry.input_ids[:length]
        if UNKNOWN in kept:
            self._entries.append(Entry(encode_input(None), PLAIN, entry.start, kept, array("i")))
            return
        num_embeds = kept.count(EMBEDDING)
        ids = kept[: length - num_embeds]
        if ids:
            self._entries.append(Entry(encode_input(ids), PLAIN, entry.start, ids, array("i")))
        if num_embeds:
            tensor, start = _first_rows(entry.tensor, num_embeds), entry.start + len(ids)
            self._entries.append(Entry(tensor, PLAIN, start, kept[len(ids) :], array("i")))


def _input_ids(tensor: InputTensor, status: Status) -> array[int]:
    """What an input became, as in ``Entry``."""
    appended_ids, num_input = status.appended_ids, status.usage.input_tokens
    if appended_ids is not None:
        return array("i", appended_ids) + array("i", [EMBEDDING]) * (num_input - len(appended_ids))
    if tensor.name == "input_ids" and num_input == tensor.shape[1]:
        return array("i", tensor.data)
    return array("i", [UNKNOWN]) * num_input


def _first_rows(tensor: InputTensor, num_rows: int) -> InputTensor:
    hidden = tensor.shape[2]
    return replace(tensor, shape=(1, num_rows, hidden), data=tensor.data[: num_rows * hidden * _FLOAT_BYTES])
