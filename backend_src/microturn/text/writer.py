"""Encodes growing text: up to the last safe cut; the rest is held.

Handles plain text, special tokens and whitespace that a template drops around contents. A `Writer` lives for one call;
the `HeldText` at its end is passed to the next one.

The held text follows directly after the last token of the context:

    <|im_start|>  user⏎       Hello wor    <|im
    an id         template    content      undecided: may become a special token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microturn.text.chat import ChatTemplate, escaped
from microturn.text.encoder import TextEncoder
from microturn.text.special_tokens import SpecialToken


@dataclass(frozen=True, slots=True)
class HeldText:
    """Input that has no tokens yet.

    Attributes:
        template: template text after its last special token; its tokens may merge with the content's.
        content: the user's text.
        undecided: the end of the user's text that may become a special token.
        is_trimmed: whether the template drops whitespace at the beginning of the content.
        is_eaten: whether the next whitespace belongs to the special token before it.
    """

    template: str = ""
    content: str = ""
    undecided: str = ""
    is_trimmed: bool = False
    is_eaten: bool = False

    def __len__(self) -> int:
        return len(self.template) + len(self.content) + len(self.undecided)


class Writer:
    """Appends text to a context.

    Attributes:
        ids: the ids that are certain.

    Args:
        encoder: of the model.
        held: of the writer before.
        last_id: the last token of the context; None if there is none or it is an embedding.
        is_context_empty: whether the context is empty.
        puts_bos: whether to begin an empty context with the model's BOS.
        escapes: whether the content of the open message is written as within a JSON string.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        held: HeldText,
        last_id: int | None,
        *,
        is_context_empty: bool,
        puts_bos: bool,
        escapes: bool = False,
    ) -> None:
        self.ids: list[int] = []
        self._encoder = encoder
        self._last_id = last_id
        self._is_context_empty = is_context_empty
        self._puts_bos = puts_bos
        self._escapes = escapes
        self._template, self._content, self._undecided = held.template, held.content, held.undecided
        self._is_trimmed, self._is_eaten = held.is_trimmed, held.is_eaten
        self._num_scanned = _num_scanned(held)

    @property
    def held(self) -> HeldText:
        """The text that has no ids yet."""
        return HeldText(self._template, self._content, self._undecided, self._is_trimmed, self._is_eaten)

    @property
    def is_at_start(self) -> bool:
        """Whether no token, not even one of the held text, precedes the text written next."""
        return self._is_context_empty and not self.ids and not self.held

    def write(self, text: str, *, parse_special: bool) -> None:
        """Writes content."""
        text = escaped(text) if self._escapes else text
        if parse_special:
            self._parse(self._undecided + text, is_complete=False)
        else:
            self._decide()
            self._write_plain(text)

    def go_on(self, ids: Sequence[int], held: HeldText) -> None:
        """Appends prepared text behind a safe cut.

        Args:
            ids: of the text from the cut on; at least one.
            held: the text behind them.
        """
        self._decide()
        self._encode(self._template + self._content)
        self._append(ids)
        self._template, self._content, self._undecided = held.template, held.content, held.undecided
        self._is_trimmed, self._is_eaten = held.is_trimmed, held.is_eaten
        self._num_scanned = _num_scanned(held)

    def open_message(self, template: ChatTemplate, previous: str | None, role: str) -> None:
        """Ends the open message and begins one of `role`, as the template does; text written next is its content.

        Args:
            template: of the model.
            previous: role of the open message; None if there is none.
            role: of the next message.

        Errors:
            InvalidArgument: the template does not accept such a message there.
        """
        if previous is None:
            self.flush()  # text before the first message is not part of it
        transition = template.transition(previous, role, is_context_empty=self.is_at_start)
        if transition.drops_space_before:
            self.drop_space_before()
        self.write_template(transition.text)
        if transition.drops_space_after:
            self.drop_space_after()
        self._escapes = transition.escapes

    def write_template(self, text: str) -> None:
        """Writes text of the chat template.

        A special token at its beginning is omitted if the context ends with it: the model has ended its message itself.
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
        """Drops whitespace at the beginning of the next content."""
        self._is_trimmed = True

    def cut(self) -> None:
        """Encodes up to the last safe cut.

        Whitespace at the end is no cut: the template may drop it, and then another character follows.
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
            answer_space: whitespace to omit at the end of the template's text if no content follows.
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
        """Treats undecided text as plain: nothing that could complete a special token follows."""
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
    """Length of the held text without safe cuts, which is not scanned again with every chunk."""
    return max(0, len((held.template + held.content).rstrip()) - 1)
