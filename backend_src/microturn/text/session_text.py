"""The text of one session, as the engine calls it (`Codec`).

Converts text to ids and generated ids to text. The whole state in between is one frozen `TextState`, so that a turn is
rolled back by assigning the earlier state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from microturn.text.chat_templates import NO_TOOLS, tools_as_json
from microturn.text.codec import Piece
from microturn.text.detokenizer import OutputState
from microturn.text.messages import open_message
from microturn.text.model_text import ModelText
from microturn.text.prepared_text import PreparedText
from microturn.text.writer import HeldText, Writer


@dataclass(frozen=True, slots=True)
class TextState:
    """The state of a session's text.

    Attributes:
        has_context: whether anything has been appended or generated.
        role: of the open message; None when there is none.
        held: input that has no ids yet.
        output: state of the detokenizer.
    """

    has_context: bool = False
    role: str | None = None
    held: HeldText = field(default_factory=HeldText)
    output: OutputState = field(default_factory=OutputState)


class SessionText:
    """Encodes and decodes the text of one session.

    Attributes:
        state: the whole state.

    Args:
        model_text: of the model.
        tools: for the chat template, as JSON objects.

    Errors:
        InvalidArgument: there are tools, and the model has no template or one that does not accept them.
    """

    def __init__(self, model_text: ModelText, tools: Sequence[Mapping[str, object]] | None = None) -> None:
        self._model = model_text
        self._tools = tools_as_json(tools) if tools else NO_TOOLS
        if tools:
            model_text.chat_template(self._tools)
        self.state = TextState()

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """The tools for the chat template, as JSON objects."""
        tools: list[Mapping[str, object]] = json.loads(self._tools)
        return tools

    def state_as_json(self, state: TextState) -> dict[str, Any]:
        """A state as `json.dumps` takes it."""
        written = asdict(state)
        written["output"]["partial_char"] = state.output.partial_char.hex()
        return written

    def state_from_json(self, written: Mapping[str, Any]) -> TextState:
        """Reads a state that `state_as_json` wrote.

        Errors:
            ValueError, TypeError, KeyError: it is not one.
        """
        output = dict(written["output"])
        output["partial_char"] = bytes.fromhex(output["partial_char"])
        output["stop"] = tuple(output["stop"])
        return TextState(written["has_context"], written["role"], HeldText(**written["held"]), OutputState(**output))

    def fork(self) -> SessionText:
        """The text of another session, with the same state."""
        return copy(self)

    def least_num_ids(self, text: str, enough: int | None = None) -> int:
        """Lower bound of the ids of this text and the held text; quick for text of any length.

        Args:
            text: for `append_text`.
            enough: counting stops beyond this many ids. Without it the bound comes from the length only.
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
            text: continues the open message, or begins one.
            role: of the text's message; None for the open one.
            parse_special: whether special tokens in the text are tokens. Otherwise they are plain text.
            flush: whether generation follows, so that all text must be in the context.
            last_token_id: the last token of the context; None if there is none, or if an embedding came last.
            prepared: the same text, prepared.

        Returns:
            Ids that are now certain to be appended. The rest is held until more text, another role or a flush.

        Errors:
            InvalidArgument: the role cannot be used, or not here. The state is unchanged.
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
        """Prepares for token ids, embeddings, or generation without input.

        Args:
            role: of its message; None for the open one.
            last_token_id: as in `append_text`.
            input_follows: whether ids or embeddings are appended next. An incomplete character ends there.

        Returns:
            Ids to append first: the held text and the beginning of the message.

        Errors:
            InvalidArgument: the role cannot be used, or not here. The state is unchanged.
        """
        writer = self._writer(role, last_token_id)
        writer.flush(answer_space=self._answer_space(role))
        self._keep(writer, role, has_input=input_follows or bool(writer.ids), input_follows=input_follows)
        return writer.ids

    def drop_held(self) -> None:
        """Drops held input that has no ids yet."""
        self.state = replace(self.state, held=HeldText())

    def begin_generation(self, stop: Sequence[str]) -> None:
        """Begins a generation with these stop strings.

        Errors:
            InvalidArgument: a stop string is empty.
        """
        assert not self.state.held, "generation would begin before held text is appended"
        self.state = replace(self.state, output=self._model.decoder.begin(self.state.output, stop))

    def accept(self, token_id: int) -> Piece:
        """Accepts the next generated token and returns the text that it made certain."""
        state = self.state
        piece, output = self._model.decoder.accept(state.output, token_id)
        self.state = TextState(True, state.role, state.held, output)
        return piece

    def end_generation(self) -> str:
        """Ends the generation; returns text that was withheld as the possible beginning of a stop string."""
        text, output = self._model.decoder.end(self.state.output)
        self.state = replace(self.state, output=output)
        return text

    def _writer(self, role: str | None, last_token_id: int | None) -> Writer:
        """A writer within a message of this role."""
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
