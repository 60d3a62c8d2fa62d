"""The text of one session: what the engine calls.

Text becomes ids, generated ids become text, and all that is remembered in between is one frozen `TextState`, so that a
turn is rolled back by assigning the earlier one. Knows the order in which an engine's turn calls it; knows nothing of
sessions, pages or other sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from microturn.codec import Piece
from microturn.text.chat_templates import NO_TOOLS, tools_as_json
from microturn.text.decoder import OutputState
from microturn.text.messages import open_message
from microturn.text.model_text import ModelText
from microturn.text.prepared_text import PreparedText
from microturn.text.writer import HeldText, Writer


@dataclass(frozen=True, slots=True)
class TextState:
    """All that a session's text remembers.

    Attributes:
        has_context: whether anything has been appended or generated.
        role: of the open message; None when there is none.
        held: input that has no ids yet.
        output: what generation goes on from.
    """

    has_context: bool = False
    role: str | None = None
    held: HeldText = field(default_factory=HeldText)
    output: OutputState = field(default_factory=OutputState)


class SessionText:
    """Turns one session's text into ids and back.

    Attributes:
        state: all that it remembers.

    Args:
        model_text: the model's.
        tools: what the chat template is told of, as JSON objects.

    Errors:
        InvalidArgument: there are tools, and the model has no template, or one that does not take them.
    """

    def __init__(self, model_text: ModelText, tools: Sequence[Mapping[str, object]] | None = None) -> None:
        self._model = model_text
        self._tools = tools_as_json(tools) if tools else NO_TOOLS
        if tools:
            model_text.chat_template(self._tools)
        self.state = TextState()

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """What the chat template is told of, as JSON objects."""
        tools: list[Mapping[str, object]] = json.loads(self._tools)
        return tools

    def state_as_json(self, state: TextState) -> dict[str, Any]:
        """A state as it is written down."""
        written = asdict(state)
        written["output"]["partial_char"] = state.output.partial_char.hex()
        return written

    def state_from_json(self, written: Mapping[str, Any]) -> TextState:
        """A state that `state_as_json` wrote.

        Errors:
            ValueError, TypeError, KeyError: it did not.
        """
        output = dict(written["output"])
        output["partial_char"] = bytes.fromhex(output["partial_char"])
        output["stop"] = tuple(output["stop"])
        return TextState(written["has_context"], written["role"], HeldText(**written["held"]), OutputState(**output))

    def fork(self) -> SessionText:
        """Another session's text that goes on from the same state."""
        return copy(self)

    def least_num_ids(self, text: str, enough: int | None = None) -> int:
        """How many ids this text and what is held become at least; quick, however long the text.

        Args:
            text: what `append_text` would be given.
            enough: a number of ids behind which nobody wants to know more. Without it only the length is looked at.
        """
        held = self.state.held
        return self._model.encoder.least_num_ids(held.template + held.content + held.undecided + text, enough)

    def append_text(
        self,
        text: str,
        *,
        role: str | None,
        parse_special: bool,
        flush: bool,
        last_token_id: int | None,
        prepared: PreparedText | None = None,
    ) -> list[int]:
        """Appends text.

        Args:
            text: goes on in the open message, or begins one.
            role: of the message that the text belongs to; None for whatever is open.
            parse_special: whether special tokens in the text are tokens. Otherwise they are plain text.
            flush: whether generation follows, for which every character must be in the context.
            last_token_id: the last token of the context; None if there is none, or if an embedding came last.
            prepared: the same text, in parts that are ids already.

        Returns:
            Ids that are now certain to be appended. The rest is held until more text, another role or a flush.

        Errors:
            InvalidArgument: the role cannot be used, or not here. Nothing has changed then.
        """
        writer = self._writer(role, last_token_id)
        if prepared is not None and prepared.ids and prepared.parse_special == parse_special:
            writer.write(prepared.head, parse_special=parse_special)
            writer.go_on(prepared.ids, prepared.held)
        else:
            writer.write(text, parse_special=parse_special)
        if flush:
            writer.flush(answer_space=self._answer_space(role))
        else:
            writer.cut()
        self._keep(writer, role, has_input=bool(text or writer.ids), input_follows=False)
        return writer.ids

    def append_other(self, *, role: str | None, last_token_id: int | None, input_follows: bool) -> list[int]:
        """Makes way for what is not text: token ids, embeddings, or generation without input.

        Args:
            role: of the message that it belongs to; None for whatever is open.
            last_token_id: as in `append_text`.
            input_follows: whether ids or embeddings are appended next. A character that generation left incomplete
                can't go on behind them.

        Returns:
            Ids to append before it: all text that was held, and the beginning of the message.

        Errors:
            InvalidArgument: the role cannot be used, or not here. Nothing has changed then.
        """
        writer = self._writer(role, last_token_id)
        writer.flush(answer_space=self._answer_space(role))
        self._keep(writer, role, has_input=input_follows or bool(writer.ids), input_follows=input_follows)
        return writer.ids

    def drop_held(self) -> None:
        """Forgets input that has no ids yet."""
        self.state = replace(self.state, held=HeldText())

    def begin_generation(self, stop: Sequence[str]) -> None:
        """From here on these strings stop generation.

        Errors:
            InvalidArgument: a stop string is empty.
        """
        assert not self.state.held, "generation would begin before the text that it answers"
        self.state = replace(self.state, output=self._model.decoder.begin(self.state.output, stop))

    def accept(self, token_id: int) -> Piece:
        """Takes the next generated token, and returns the text that it made certain."""
        state = self.state
        piece, output = self._model.decoder.accept(state.output, token_id)
        self.state = TextState(True, state.role, state.held, output)
        return piece

    def end_generation(self) -> str:
        """Text that was withheld only because it might have begun a stop string."""
        text, output = self._model.decoder.end(self.state.output)
        self.state = replace(self.state, output=output)
        return text

    def _writer(self, role: str | None, last_token_id: int | None) -> Writer:
        """A writer that stands in the message of this role."""
        state = self.state
        writer = Writer(
            self._model.encoder,
            state.held,
            last_token_id,
            is_context_empty=not state.has_context and last_token_id is None,
            puts_bos=state.role is None and (role is None or bool(state.held)),
        )
        if role is not None and role != state.role:
            open_message(writer, self._model.chat_template(self._tools), state.role, role)
        return writer

    def _answer_space(self, role: str | None) -> str:
        is_answer = (role or self.state.role) == "assistant"
        return self._model.chat_template(self._tools).answer_space if is_answer else ""

    def _keep(self, writer: Writer, role: str | None, *, has_input: bool, input_follows: bool) -> None:
        state = self.state
        self.state = TextState(
            has_context=state.has_context or input_follows or bool(writer.ids),
            role=role or state.role,
            held=writer.held,
            output=self._model.decoder.interrupt(state.output) if has_input else state.output,
        )
