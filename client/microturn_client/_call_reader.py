"""Finds tool calls in an answer as it comes, in the notations of several families of models.

    family    a call
    hermes    ``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``
    Llama 3   ``{"name": "f", "parameters": {…}}`` at the beginning, or behind ``<|python_tag|>``
    Mistral   ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``, or ``[TOOL_CALLS]f[ARGS]{…}``
    pythonic  ``[f(city="Bern")]`` at the beginning, or behind ``<|python_start|>``
    harmony   ``<|channel|>commentary to=functions.f <|message|>{…}<|call|>``

The marks differ, so the family need not be known. A notation without a mark counts at the beginning of an answer only,
and only where it names a tool of the session.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

from microturn_client._answer_reader import AnswerEndedError, AnswerReader, MalformedError, Reading
from microturn_client._growing_call import GrowingCall, string_of
from microturn_client._python_call import keywords_as_json
from microturn_client._tool_events import ToolEvent

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_PYTHON_TAG, _PYTHON_START, _PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MARKS = (_HERMES, _MISTRAL, _PYTHON_TAG, _PYTHON_START, _START, _CHANNEL)
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", "id", "type", *_ARGUMENT_KEYS)


class CallReader:
    """Parts an answer's text into what is said and what is called.

    Args:
        names: of the session's tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._answer = AnswerReader()
        self._said = ""
        self._events: list[ToolEvent] = []
        self._has_called = False
        self._reading = self._read()

    def feed(self, text: str) -> tuple[str, list[ToolEvent]]:
        """Takes more of the answer; returns what was said to the user, and what came of calls."""
        self._answer.grow(text)
        return self._go_on()

    def end(self) -> tuple[str, list[ToolEvent]]:
        """The answer has ended; returns what was held back. A call that is cut short ends without arguments."""
        self._answer.complete()
        return self._go_on()

    def _go_on(self) -> tuple[str, list[ToolEvent]]:
        next(self._reading, None)
        said, events = self._said, self._events
        self._said, self._events = "", []
        return said, events

    def _say(self, text: str) -> None:
        self._said += text

    def _read(self) -> Reading[None]:
        yield from self._attempt("", self._bare())
        mark: str | None = ""
        while mark is not None:
            mark = yield from self._answer.until_mark(_MARKS, self._say)
            while mark in (_START, _CHANNEL):
                mark = yield from self._harmony(mark)
            if mark:
                yield from self._attempt(mark, self._marked(mark))

    def _attempt(self, mark: str, reading: Reading[None]) -> Reading[None]:
        """Reads calls behind a mark; where there are none, the mark is said, and what is behind it is read again."""
        self._answer.taken, self._has_called = "", False
        try:
            yield from reading
        except (MalformedError, AnswerEndedError):
            if not self._has_called:
                self._say(mark)
                self._answer.put_back()

    # ---- the families --------------------------------------------------------------------------------------------

    def _bare(self) -> Reading[None]:
        """Calls without a mark."""
        yield from self._answer.skip_space()
        first = yield from self._answer.peek()
        if first == "{":
            yield from self._objects(separators=";", of_known=True)
        elif first == "[":
            self._answer.take()
            yield from self._answer.skip_space()
            if (yield from self._answer.peek()) == "{":
                yield from self._objects(separators=",", of_known=True)
                yield from self._answer.expect("]")
            else:
                yield from self._python_calls(of_known=True)
        else:
            raise MalformedError

    def _marked(self, mark: str) -> Reading[None]:
        """Calls behind a mark."""
        answer = self._answer
        yield from answer.skip_space()
        first = yield from answer.peek()
        if mark == _HERMES:
            try:
                yield from self._object()
            except MalformedError:
                if not self._has_called:
                    raise
            yield from answer.until_mark((_HERMES_END,), _drop)
        elif mark == _MISTRAL and first not in "[{":
            yield from self._named_call()
        elif first == "[":
            answer.take()
            yield from answer.skip_space()
            if (yield from answer.peek()) == "{":
                yield from self._objects(separators=",")
                yield from answer.expect("]")
            else:
                yield from self._python_calls()
            yield from answer.optional(_PYTHON_END)
        else:
            yield from self._objects(separators=";")
        with suppress(AnswerEndedError):
            yield from answer.skip_space()

    def _named_call(self) -> Reading[None]:
        """Mistral's newer notation."""
        call = GrowingCall(self._tell)
        name = (yield from self._answer.until("[{")).strip()
        if (yield from self._answer.peek()) == "[":
            if (yield from self._answer.optional(_CALL_ID)):
                call.id = yield from self._answer.until("[")
            yield from self._answer.expect(_ARGS)
        call.begin(name)
        yield from self._arguments_of(call)

    def _harmony(self, mark: str) -> Reading[str | None]:
        """A message with its header; returns the mark that begins the next one."""
        header: list[str] = []
        while mark != _MESSAGE:
            header.append(" ")
            following = yield from self._answer.until_mark((_CHANNEL, _MESSAGE), header.append)
            if following is None:
                return None
            mark = following
        recipient = _RECIPIENT.search("".join(header))
        call = GrowingCall(self._tell)
        if recipient is not None:
            call.begin(recipient[1])
        told = _drop if "analysis" in "".join(header).split() else self._say
        end = yield from self._answer.until_mark(_MESSAGE_ENDS, told if recipient is None else call.add)
        if recipient is not None:
            call.end()
        return end if end is None or end in (_START, _CHANNEL) else ""

    # ---- their parts ---------------------------------------------------------------------------------------------

    def _objects(self, *, separators: str, of_known: bool = False) -> Reading[None]:
        """Calls as JSON objects."""
        yield from self._object(of_known=of_known)
        with suppress(AnswerEndedError):
            yield from self._answer.skip_space()
            while (yield from self._answer.peek()) in separators:
                yield from self._answer.skip_space(separators)
                yield from self._object(of_known=of_known)
                yield from self._answer.skip_space()

    def _object(self, *, of_known: bool = False) -> Reading[None]:
        """A call as a JSON object."""
        answer, call = self._answer, GrowingCall(self._tell)
        try:
            yield from answer.expect("{")
            yield from answer.skip_space()
            while (yield from answer.peek()) != "}":
                key = string_of((yield from answer.value()))
                if of_known and key not in _CALL_KEYS:
                    raise MalformedError
                yield from answer.skip_space()
                yield from answer.expect(":")
                yield from answer.skip_space()
                if key in _ARGUMENT_KEYS:
                    yield from answer.value(call.add)
                else:
                    self._learn(call, key, string_of((yield from answer.value())), of_known=of_known)
                yield from answer.skip_space(",")
            answer.take()
            call.end()
        except (MalformedError, AnswerEndedError):
            call.break_off()
            raise

    def _learn(self, call: GrowingCall, key: str, said: str, *, of_known: bool) -> None:
        if key == "id":
            call.id = call.id or said
        elif key == "name" and call.name is None:
            if of_known and said not in self._names:
                raise MalformedError
            call.begin(said)

    def _arguments_of(self, call: GrowingCall) -> Reading[None]:
        try:
            yield from self._answer.skip_space()
            yield from self._answer.value(call.add)
        except (MalformedError, AnswerEndedError):
            call.break_off()
            raise
        call.end()

    def _python_calls(self, *, of_known: bool = False) -> Reading[None]:
        """Calls as Python writes them, behind the opening bracket."""
        while True:
            yield from self._answer.skip_space(",")
            if (yield from self._answer.peek()) == "]":
                self._answer.take()
                return
            name = (yield from self._answer.until("()[]{},\"'\n")).strip()
            if not name.replace(".", "_").isidentifier() or (of_known and name not in self._names):
                raise MalformedError
            yield from self._answer.expect("(")
            call = GrowingCall(self._tell)
            call.begin(name)
            try:
                call.add(keywords_as_json((yield from self._python_arguments())))
            except (MalformedError, AnswerEndedError):
                call.break_off()
                raise
            call.end()

    def _python_arguments(self) -> Reading[str]:
        """What stands before the closing parenthesis, which is read too."""
        text, depth = "", 0
        while (char := (yield from self._answer.peek())) != ")" or depth:
            depth += (char in "([{") - (char in ")]}")
            text += (yield from self._answer.quoted()) if char in "\"'" else self._answer.take()
        self._answer.take()
        return text

    def _tell(self, event: ToolEvent) -> None:
        self._has_called = True
        self._events.append(event)


def _drop(_text: str) -> None:
    """What is not for the user."""
