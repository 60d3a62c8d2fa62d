"""The text of one session, as the engine calls it (`Codec`).

Converts text to ids and generated ids to text. The whole state in between is one frozen `TextState`, so that a turn is
rolled back by assigning the earlier state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from microturn.text.chat import ChatTemplate
from microturn.text.chat_templates import NO_TOOLS
from microturn.text.codec import Piece
from microturn.text.detokenizer import OutputState
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
    """The text of one session; `Codec` describes the methods.

    Attributes:
        state: the whole state.
        tools: of its chat template.

    Args:
        model_text: of the model.
        tools: for the chat template, from `tools_as_json`.

    Errors:
        InvalidArgument: there are tools, and the model has no template or one that does not accept them.
    """

    def __init__(self, model_text: ModelText, tools: str = NO_TOOLS) -> None:
        self._model = model_text
        self.tools = tools
        self._learnt = model_text.chat_template(tools) if tools else None
        self.state = TextState()

    def state_as_json(self, state: TextState) -> dict[str, Any]:
        written = asdict(state)
        written["output"]["partial_char"] = state.output.partial_char.hex()
        return written

    def state_from_json(self, written: Mapping[str, Any]) -> TextState:
        output = dict(written["output"])
        output.pop("replaced", None)  # servers wrote it that began the next answer with U+FFFD
        output["partial_char"] = bytes.fromhex(output["partial_char"])
        output["stop"] = tuple(output["stop"])
        return TextState(written["has_context"], written["role"], HeldText(**written["held"]), OutputState(**output))

    @property
    def num_held(self) -> int:
        return len(self.state.held)

    def fork(self) -> SessionText:
        return copy(self)

    def least_num_ids(self, text: str, enough: int | None = None) -> int:
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
        writer = self._writer(role, last_token_id)
        is_prepared = prepared is not None and prepared.ids and prepared.parse_special == parse_special
        if prepared is not None and is_prepared and not self._escapes(role):
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
        writer = self._writer(role, last_token_id)
        writer.flush(answer_space=self._answer_space(role))
        self._keep(writer, role, has_input=input_follows or bool(writer.ids), input_follows=input_follows)
        return writer.ids

    def drop_held(self) -> None:
        self.state = replace(self.state, held=HeldText())

    def drop_half_character(self) -> None:
        self.state = replace(self.state, output=self._model.detokenizer.drop_half_character(self.state.output))

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None:
        assert not self.state.held, "generation would begin before held text is appended"
        output = self._model.detokenizer.begin(self.state.output, stop, shows_special=shows_special)
        self.state = replace(self.state, output=output)

    def accept(self, token_id: int) -> Piece:
        state = self.state
        piece, output = self._model.detokenizer.accept(state.output, token_id)
        self.state = TextState(True, state.role, state.held, output)
        return piece

    def end_generation(self) -> str:
        text, output = self._model.detokenizer.end(self.state.output)
        self.state = replace(self.state, output=output)
        return text

    @property
    def _template(self) -> ChatTemplate:
        """The session's own from its first message on: learning it anew would hold up all others."""
        if self._learnt is None:
            self._learnt = self._model.chat_template(self.tools)
        return self._learnt

    def _writer(self, role: str | None, last_token_id: int | None) -> Writer:
        """A writer within a message of this role."""
        state = self.state
        writer = Writer(
            self._model.encoder,
            state.held,
            last_token_id,
            is_context_empty=not state.has_context and last_token_id is None,
            puts_bos=state.role is None and (role is None or bool(state.held)),
            escapes=self._escapes(None),
        )
        if role is not None and (role != state.role or role == "tool"):  # each result of a tool is a message
            writer.open_message(self._template, state.role, role)
        return writer

    def _escapes(self, role: str | None) -> bool:
        """Whether the content of a message of this role, or of the open one, is written as within a JSON string."""
        role = role or self.state.role
        return role is not None and self._template.escapes(role)

    def _answer_space(self, role: str | None) -> str:
        is_answer = (role or self.state.role) == "assistant"
        return self._template.answer_space if is_answer else ""

    def _keep(self, writer: Writer, role: str | None, *, has_input: bool, input_follows: bool) -> None:
        state = self.state
        self.state = TextState(
            has_context=state.has_context or input_follows or bool(writer.ids),
            role=role or state.role,
            held=writer.held,
            output=self._model.detokenizer.interrupt(state.output) if has_input else state.output,
        )
