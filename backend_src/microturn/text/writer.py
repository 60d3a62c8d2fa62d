"""Turns growing text into ids: encodes up to the last safe cut, holds the rest.

Knows plain text, special tokens and what a template drops around a message's content. Doesn't know roles or turns: a
`Writer` lives for one call, and what it holds at the end is the `HeldText` that the next one begins with.

The held text follows right after the last token of the context:

    <|im_start|>  user⏎       Hello wor    <|im
    an id         template    content      undecided: may become a special token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microturn.text.encoder import TextEncoder
from microturn.text.special_tokens import SpecialToken


@dataclass(frozen=True, slots=True)
class HeldText:
    """Input that has no tokens yet.

    Attributes:
        template: text of the chat template after its last special token; it may merge with the content.
        content: what the user wrote.
        undecided: what the user wrote and may go on as a special token.
        is_trimmed: whether the template drops whitespace that the content begins with.
        is_eaten: whether whitespace that comes next belongs to the special token before it.
    """

    template: str = ""
    content: str = ""
    undecided: str = ""
    is_trimmed: bool = False
    is_eaten: bool = False

    def __bool__(self) -> bool:
        return bool(self.template or self.content or self.undecided)


class Writer:
    """Appends text to a context.

    Attributes:
        ids: what has become certain.

    Args:
        encoder: the model's.
        held: what the writer before held.
        last_id: the last token of the context; None if that isn't a token.
        is_context_empty: whether no token is in the context.
        puts_bos: whether an empty context gets the model's BOS.
    """

    def __init__(
        self, encoder: TextEncoder, held: HeldText, last_id: int | None, *, is_context_empty: bool, puts_bos: bool
    ) -> None:
        self.ids: list[int] = []
        self._encoder = encoder
        self._last_id = last_id
        self._is_context_empty = is_context_empty
        self._puts_bos = puts_bos
        self._template, self._content, self._undecided = held.template, held.content, held.undecided
        self._is_trimmed, self._is_eaten = held.is_trimmed, held.is_eaten
        self._num_scanned = _num_scanned(held)

    @property
    def held(self) -> HeldText:
        """What has no ids yet."""
        return HeldText(self._template, self._content, self._undecided, self._is_trimmed, self._is_eaten)

    @property
    def is_at_start(self) -> bool:
        """Whether no token comes before what is written next, not even one of the text that is held."""
        return self._is_context_empty and not self.ids and not self.held

    def write(self, text: str, *, parse_special: bool) -> None:
        """Writes content."""
        if parse_special:
            self._parse(self._undecided + text, is_complete=False)
        else:
            self._decide()
            self._write_plain(text)

    def go_on(self, ids: Sequence[int], held: HeldText) -> None:
        """Appends what another writer has made of text behind a safe cut: its ids, and what it holds.

        Args:
            ids: of the text from the cut on; at least one.
            held: what stands behind them.
        """
        self._decide()
        self._encode(self._template + self._content)
        self._append(ids)
        self._template, self._content, self._undecided = held.template, held.content, held.undecided
        self._is_trimmed, self._is_eaten = held.is_trimmed, held.is_eaten
        self._num_scanned = _num_scanned(held)

    def write_template(self, text: str) -> None:
        """Writes text of the chat template.

        A special token that it begins with is left out where the context ends with that token: the model has ended its
        message by itself.
        """
        self._decide()
        self._is_trimmed = False
        self._template, self._content = self._template + self._content, ""
        if not self._template:
            text = self._without_repeated_end(text)
        self._parse(text, is_complete=True)
        self._template, self._content = self._template + self._content, ""

    def drop_space_before(self) -> None:
        """Drops whitespace at the end of the content."""
        self._decide()
        self._content = self._content.rstrip()
        self._num_scanned = 0

    def drop_space_after(self) -> None:
        """Drops whitespace at the beginning of the content that comes next."""
        self._is_trimmed = True

    def cut(self) -> None:
        """Encodes up to the last safe cut.

        Whitespace at the end makes none: the template may drop it, and then another character follows.
        """
        text = self._template + self._content
        end = self._encoder.boundaries.last(text.rstrip(), self._num_scanned)
        if end:
            self._encode(text[:end])
            self._content = self._content[max(0, end - len(self._template)) :]
            self._template = self._template[end:]

    def flush(self, *, answer_space: str = "") -> None:
        """Encodes everything.

        Args:
            answer_space: what to leave out at the end of the template's text when no content follows it.
        """
        self._decide()
        if not self._content:
            self._template = self._template.removesuffix(answer_space)
        self._encode(self._template + self._content)
        self._template = self._content = ""
        self._num_scanned = 0
        self._is_trimmed = self._is_eaten = False

    def _parse(self, text: str, *, is_complete: bool) -> None:
        parsed = self._encoder.special_tokens.parse(text, is_complete=is_complete)
        for plain, token in parsed.parts:
            self._write_plain(plain)
            self._write_special(token)
        self._write_plain(parsed.rest)
        self._undecided = parsed.undecided

    def _decide(self) -> None:
        """Nothing that could complete a special token follows."""
        if self._undecided:
            self._parse(self._undecided, is_complete=True)

    def _write_plain(self, text: str) -> None:
        if self._is_trimmed or self._is_eaten:
            text = text.lstrip()
        if text:
            self._is_trimmed = self._is_eaten = False
            self._content += text

    def _write_special(self, token: SpecialToken) -> None:
        text = self._template + self._content
        self._encode(text.rstrip() if token.eats_space_before else text)
        self._template = self._content = ""
        self._num_scanned = 0
        self._append([token.id])
        self._is_trimmed, self._is_eaten = False, token.eats_space_after

    def _without_repeated_end(self, text: str) -> str:
        parts = self._encoder.special_tokens.parse(text, is_complete=True).parts
        if parts and not parts[0][0].strip() and parts[0][1].id == self._previous_id:
            return text[len(parts[0][0]) + len(parts[0][1].text) :]
        return text

    def _encode(self, text: str) -> None:
        if text:
            is_first = self._is_context_empty and not self.ids
            begins = is_first or self._encoder.begins_anew_after(self._previous_id)
            self._append(self._encoder.encode(text, begins=begins))

    def _append(self, ids: Sequence[int]) -> None:
        bos_ids = self._encoder.bos_ids
        if self._is_context_empty and not self.ids and self._puts_bos and tuple(ids[: len(bos_ids)]) != bos_ids:
            self.ids.extend(bos_ids)
        self.ids.extend(ids)

    @property
    def _previous_id(self) -> int | None:
        return self.ids[-1] if self.ids else self._last_id


def _num_scanned(held: HeldText) -> int:
    """Held text has no safe cut but perhaps at its end: it is not looked through again with every chunk."""
    return max(0, len((held.template + held.content).rstrip()) - 1)
