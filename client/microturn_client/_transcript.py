"""What a session knows, as its client can tell it again: for each turn its input as it was sent, and all token ids.

    entry      start │ input │ generated │ end = start of the next

A cut is the same as on the server: entries that had ended stay whole, text without ids included; of the one that is cut
in two stays what is before. Knows no numbers of turns and no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from microturn_client._events import Status
from microturn_client._inputs import InputTensor, encode_input

# Stands for an embedding among token ids.
EMBEDDING = -1

# A character has at most four bytes, and a token that is text has one: so many tokens say what is left of it.
_NUM_GENERATED_AGAIN = 4


@dataclass(frozen=True)
class Entry:
    """One turn that has ended.

    Attributes:
        tensor: its input, as it was sent.
        options: how the input was meant: ``role``, ``parse_special``.
        start: absolute position of its first token.
        input_ids: what the input became, ``EMBEDDING`` for each embedding; None where the server did not say.
        input_len: how many those are.
        output_ids: what was generated.
        is_settled: no text was held back behind it.
        sampling: how its tokens were chosen.
    """

    tensor: InputTensor
    options: dict[str, object]
    start: int
    input_ids: tuple[int, ...] | None
    input_len: int
    output_ids: tuple[int, ...]
    is_settled: bool = True
    sampling: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether its input was ids, and became these and no others."""
        is_ids = self.tensor.name == "input_ids" and not self.options
        return is_ids and self.input_ids == tuple(np.frombuffer(self.tensor.data, "<i4").tolist())

    @property
    def output_start(self) -> int:
        return self.start + self.input_len

    @property
    def end(self) -> int:
        return self.output_start + len(self.output_ids)

    @property
    def num_bytes(self) -> int:
        return len(self.tensor.data) + 4 * (self.end - self.start)


@dataclass(frozen=True)
class Piece:
    """One turn of a replay; it generates nothing unless its options say so."""

    tensor: InputTensor
    options: dict[str, object] = field(default_factory=dict)


class Transcript:
    """The turns of one session that have ended.

    Attributes:
        is_complete: nothing is missing at its beginning, and the server agreed on its length.
        is_torn: an input that was not mere ids was cut in two: its ids are known, and not what a text would go on from.

    Args:
        max_bytes: what is kept at most.
    """

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.is_complete = True
        self.is_torn = False
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: list[Entry] = []
        self._len = 0

    def __len__(self) -> int:
        """Length of the context in tokens."""
        return self._len

    @property
    def is_replayable(self) -> bool:
        """Whether all is known that a new session must be told."""
        return self.is_complete and all(entry.input_ids is not None for entry in self._entries)

    def copy(self) -> Transcript:
        """An independent transcript of the same turns."""
        twin = Transcript(self._max_bytes)
        twin.is_complete, twin.is_torn, twin._num_bytes = self.is_complete, self.is_torn, self._num_bytes
        twin._entries, twin._len = self._entries[:], self._len
        return twin

    def begin_at(self, context_len: int) -> None:
        """What came before is not known; from here on it goes on."""
        self.is_complete = context_len == 0
        self._entries.clear()
        self._num_bytes, self._len = 0, context_len

    def add(
        self,
        tensor: InputTensor,
        options: dict[str, object],
        status: Status,
        output_ids: Sequence[int],
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
            sampling: how its tokens were chosen.
            was_to_generate: it asked for tokens.
        """
        appended_ids, num_input = status.appended_ids, status.usage.input_tokens
        input_ids: tuple[int, ...] | None = None
        if appended_ids is not None:
            input_ids = (*appended_ids, *[EMBEDDING] * (num_input - len(appended_ids)))
        elif tensor.name == "input_ids" and num_input == tensor.shape[1]:
            input_ids = tuple(np.frombuffer(tensor.data, "<i4").tolist())
        # One that was interrupted may have waited in the queue, where its last word was held.
        was_answered = bool(output_ids) or (was_to_generate and status.finish_reason != "interrupted")
        is_settled = was_answered or (tensor.name != "text_input" and not tensor.is_empty)
        entry = Entry(tensor, options, self._len, input_ids, num_input, tuple(output_ids), is_settled, sampling)
        self._entries.append(entry)
        self._len = entry.end
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes and self._entries:
            self.is_complete = False
            self._num_bytes -= self._entries.pop(0).num_bytes

    def behind(self, position: int) -> list[Entry]:
        """The entries that a cut would remove whole."""
        return [entry for entry in self._entries if entry.start >= position and entry.end > position]

    def cut(self, position: int) -> None:
        """Forgets what is behind a position."""
        if position >= self._len:
            return
        removed = [entry for entry in self._entries if entry.end > position]
        del self._entries[len(self._entries) - len(removed) :]
        self._num_bytes -= sum(entry.num_bytes for entry in removed)
        if removed and removed[0].start < position:
            self._add_beginning(removed[0], position - removed[0].start)
        self._len = position

    def ids(self) -> list[int]:
        """All token ids, ``EMBEDDING`` for each embedding; of a transcript that is replayable."""
        return [token_id for entry in self._entries for token_id in (*(entry.input_ids or ()), *entry.output_ids)]

    def as_said(self) -> list[Piece]:
        """The turns to tell it again so that roles, half words and half characters are known as well.

        The last tokens of the last answer are generated again, since what a character begins with is known behind
        generated tokens only. Where no roles are in use, ids say all up to the last turn that left no half word.
        """
        entries = self._entries
        has_roles = any("role" in entry.options for entry in entries)
        num_answered = _count_up_to_last(entries, lambda entry: bool(entry.output_ids))
        num_settled = num_answered if has_roles else _count_up_to_last(entries, lambda entry: entry.is_settled)
        return [
            *_pieces(entries[:num_answered], by_ids=not has_roles, generates_last=True),
            *_pieces(entries[num_answered:num_settled], by_ids=True),
            *_pieces(entries[num_settled:], by_ids=False),
        ]

    def as_ids(self) -> list[Piece]:
        """The turns to tell it again by its ids alone."""
        return _pieces(self._entries, by_ids=True)

    def _add_beginning(self, entry: Entry, length: int) -> None:
        """Adds the first tokens of an entry."""
        if length >= entry.input_len:
            kept = replace(entry, output_ids=entry.output_ids[: length - entry.input_len])
            self._add_entry(kept)
            return
        self.is_torn = self.is_torn or entry.tensor.name == "text_input" or bool(entry.options)
        if entry.input_ids is None:
            self.is_complete = False
            return
        ids = [token_id for token_id in entry.input_ids[:length] if token_id != EMBEDDING]
        if ids:
            self._add_entry(Entry(encode_input(ids), {}, entry.start, tuple(ids), len(ids), ()))
        if num_embeds := length - len(ids):
            start = entry.start + len(ids)
            self._add_entry(
                Entry(_first_rows(entry.tensor, num_embeds), {}, start, (EMBEDDING,) * num_embeds, num_embeds, ())
            )

    def _add_entry(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._num_bytes += entry.num_bytes


def _count_up_to_last(entries: Sequence[Entry], is_meant: Callable[[Entry], bool]) -> int:
    return max((number for number, entry in enumerate(entries, 1) if is_meant(entry)), default=0)


def _pieces(entries: Sequence[Entry], *, by_ids: bool, generates_last: bool = False) -> list[Piece]:
    """Turns that tell entries; ids that follow upon each other are one.

    Args:
        entries: what is told.
        by_ids: by ids and embeddings, whatever they were; else as they were said.
        generates_last: the last tokens of the last entry are generated again.
    """
    pieces: list[Piece] = []
    plain: list[int] = []
    for entry in entries:
        is_embeds = entry.tensor.name == "input_embeds"
        if by_ids or entry.is_plain:
            plain += [token_id for token_id in entry.input_ids or () if token_id != EMBEDDING]
        if is_embeds or not (by_ids or entry.is_plain):
            pieces += [Piece(encode_input(plain))] if plain else []
            pieces.append(Piece(entry.tensor, {} if by_ids else entry.options))
            plain = []
        plain += entry.output_ids
    if generates_last and entries:
        last = entries[-1]
        num_tokens = min(_NUM_GENERATED_AGAIN, len(last.output_ids))
        given = encode_input(plain[: len(plain) - num_tokens])
        return [*pieces, Piece(given, {**last.sampling, "ignore_eos": True, "max_tokens": num_tokens})]
    return [*pieces, Piece(encode_input(plain))] if plain else pieces


def _first_rows(tensor: InputTensor, num_rows: int) -> InputTensor:
    rows = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape[1:])[:num_rows]
    return encode_input(rows)
