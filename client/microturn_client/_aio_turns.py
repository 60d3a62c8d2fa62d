"""How turns of a session are begun, for asyncio: ``AsyncTurns``."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Unpack

from microturn_client._aio_beat import turns_on_the_beat
from microturn_client._aio_stream import AsyncStream
from microturn_client._aio_turn import AsyncTurn
from microturn_client._beat import Beat
from microturn_client._errors import InvalidArgument, MicroturnError
from microturn_client._events import Event, Status
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._new_turn import begin_ask
from microturn_client._options import AppendOptions, MessageRole, TurnOptions
from microturn_client._session_core import SessionCore
from microturn_client._session_facts import SessionFacts
from microturn_client._timeouts import Timeouts
from microturn_client._tool_events import ToolCall, result_text

_WITHDRAWN = "microturn: the input had not been sent, and is not appended"
_STAYS = "microturn: the input was on its way, and stays in the context unless the server refuses it"


class AsyncTurns(SessionFacts):
    """What a session is told, and asked."""

    def __init__(self, core: SessionCore, stream: AsyncStream, timeouts: Timeouts) -> None:
        super().__init__(core)
        self._stream = stream
        self._timeouts = timeouts

    def turn(
        self,
        input: TurnInput = None,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncTurn:
        """Begins a turn: appends the input and generates. Not awaited itself; iterate over what it returns.

        With ``role="user"`` it goes on writing the user's message: :meth:`ask` has it answered.

        Args:
            input: text (or its UTF-8 bytes); token ids as a sequence or an integer array ``[n]``; embeddings as a
                floating array ``[n, hidden]``; None to go on generating (with ``max_tokens``) or only to keep alive.
            timeout_s: seconds of silence through which the turn is waited for; the session's unless told.
            total_timeout_s: seconds from now in which the turn must end; the session's unless told.
            options: see :class:`TurnOptions`.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire.
            MicroturnError: when the session is closed or lost. What the server refuses is raised by the iterator.
        """
        tensor = encode_input(input)
        timeouts = self._timeouts.with_said(timeout_s, total_timeout_s)
        with self._stream.lock:
            pending = self._core.begin_turn(tensor, options, *timeouts)
            self._stream.flush()
        return AsyncTurn(self, pending)

    def ask(
        self,
        message: TurnInput,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncTurn:
        """Begins the answer to a user's message: appends the message, and generates with ``role="assistant"``.

        Not awaited itself; iterate over what it returns. The model needs a chat template.

        Args:
            message: the rest of the user's message, or all of it; as with :meth:`turn`.
            timeout_s: as with :meth:`turn`.
            total_timeout_s: as with :meth:`turn`.
            options: of the answer; see :class:`TurnOptions`.

        Raises:
            InvalidArgument: a ``role`` was given.
            MicroturnError: as with :meth:`turn`; the iterator also raises why the message was refused.
            TypeError: as with :meth:`turn`; the iterator also raises why the message was refused.
        """
        tensor = encode_input(message)
        timeouts = self._timeouts.with_said(timeout_s, total_timeout_s)
        with self._stream.lock:
            answer = begin_ask(self._core, tensor, options, timeouts)
            self._stream.flush()
        return AsyncTurn(self, answer)

    def tool_result(
        self,
        call: ToolCall,
        result: object,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncTurn:
        """Begins the answer to a tool's result: appends the result as the tool's message, and generates.

        Not awaited itself. Chat templates have no place for the ids of calls: the results of several calls are given in
        the order of these, all but the last with ``max_tokens=0``. Meanwhile others may be appended, as the user's.

        Args:
            call: what the tool was called with.
            result: text; anything else becomes its JSON.
            timeout_s: as with :meth:`turn`.
            total_timeout_s: as with :meth:`turn`.
            options: of the answer; see :class:`TurnOptions`.

        Raises:
            InvalidArgument: a ``role`` was given, or the result is neither text nor JSON.
            MicroturnError: as with :meth:`turn`; the iterator also raises why the result was refused, as where the chat
                template knows no messages of tools.
        """
        tensor = encode_input(result_text(call, result))
        timeouts = self._timeouts.with_said(timeout_s, total_timeout_s)
        with self._stream.lock:
            answer = begin_ask(self._core, tensor, options, timeouts, "tool")
            self._stream.flush()
        return AsyncTurn(self, answer)

    async def append(
        self,
        input: TurnInput,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[AppendOptions],
    ) -> Status:
        """Appends the input, generates nothing, and waits until that is done.

        Cancelled while it waits, it takes back an input that is not on the wire. One that is stays in the context, and
        a note of the exception says so.

        Raises:
            InvalidArgument: ``max_tokens`` was given.
            MicroturnError: when the turn failed, in which case nothing was appended.
        """
        if "max_tokens" in options:
            raise InvalidArgument("append() generates nothing: max_tokens is an option of turn()")
        turn = self.turn(input, timeout_s=timeout_s, total_timeout_s=total_timeout_s, max_tokens=0, **options)
        try:
            return await turn.wait()
        except MicroturnError:
            raise
        except BaseException as error:
            with self._stream.lock:
                is_withdrawn = self._core.outbox.remove_unsent(turn._pending)
            error.add_note(_WITHDRAWN if is_withdrawn else _STAYS)
            raise

    async def count_tokens(
        self,
        input: TurnInput,
        /,
        *,
        role: MessageRole | None = None,
        parse_special: bool | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """How many tokens an input would add to the context if it were answered now; it adds none.

        Text that the server still holds is counted too, and what the chat template puts around a message. It waits for
        the turns before it; :meth:`AsyncClient.count_tokens` waits for none.

        Args:
            input: as with :meth:`append`.
            role: as with :meth:`append`.
            parse_special: as with :meth:`append`.
            timeout_s: as with :meth:`append`.

        Raises:
            ContextFull: it does not fit into the context.
            MicroturnError: when the turn failed.
        """
        options: AppendOptions = {"count_only": True}
        if role is not None:
            options["role"] = role
        if parse_special is not None:
            options["parse_special"] = parse_special
        return (await self.append(input, timeout_s=timeout_s, **options)).usage.input_tokens

    def stream(
        self, source: AsyncIterable[TurnInput], *, every_ms: float = 200.0, **options: Unpack[TurnOptions]
    ) -> AsyncIterator[Event | Beat]:
        """Makes micro-turns of what a source yields: on each beat, one of all that came since the last.

        What comes while a turn runs waits for the next beat. Only so many chunks wait; then the source does. A beat on
        which nothing came has no turn.

        Args:
            source: an async iterable of text, token ids, or arrays of embeddings ``[n, hidden]``.
                A task of its own iterates over it.
            every_ms: milliseconds between two beats.
            options: of each turn.

        Yields:
            A :class:`Beat` as each micro-turn begins, then its events.

        Raises:
            MicroturnError: when a turn fails.
        """
        return turns_on_the_beat(lambda given: self.turn(given, **options), aiter(source), every_ms / 1e3)
