"""One session and its turns, for asyncio: ``AsyncSession``, ``AsyncTurn``. A shell around the session core."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from microturn_client._aio_beat import turns_on_the_beat
from microturn_client._beat import Beat
from microturn_client._errors import MicroturnError
from microturn_client._events import Event, Status, TurnEnd
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._options import AppendOptions, TurnOptions
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._session_facts import SessionFacts
from microturn_client._session_state import DEFAULT_CLOSE_TIMEOUT_S
from microturn_client._wire import new_session_id

if TYPE_CHECKING:
    from microturn_client._aio import AsyncClient


class AsyncTurn(AsyncIterator[Event]):
    """The events of one turn as they come: any number of :class:`Tokens`, then one :class:`TurnEnd`.

    The turn is on its way already. Where a failure befell the session and was survived, a :class:`Resumed` says so.
    Leave the iterator at any time: the answer is cut behind the last token that was handed out, and the next turn goes
    on from there.
    """

    def __init__(self, session: AsyncSession, pending: PendingTurn) -> None:
        self._session = session
        self._pending = pending

    async def __anext__(self) -> Event:
        """Waits for the next event.

        Raises:
            MicroturnError: when the turn failed; :class:`TurnTimeout` when it did not end within its ``timeout_s``.
        """
        event = await self._session._stream.next_event(self._pending)
        if event is None:
            raise StopAsyncIteration
        return event

    async def wait(self) -> Status:
        """Lets the turn end and drops what it says on the way.

        Raises:
            MicroturnError: as iterating does.
            ValueError: when the end was handed out before, or the turn was closed.
        """
        async for event in self:
            if isinstance(event, TurnEnd):
                return event.status
        raise ValueError("the end of this turn was handed out before")

    def close(self) -> None:
        """Leaves the turn; happens by itself when nobody holds it any more."""
        self._session._stream.leave(self._pending)

    def __del__(self) -> None:
        self._pending.leave()


class AsyncSession(SessionFacts):
    """One streaming session: a context that lives on the server and grows turn by turn.

    Made by :meth:`AsyncClient.session`; use it in an ``async with`` block. Several tasks of one event loop may use it.
    Turns are answered in the order in which they were begun, each to its own iterator.
    While a program holds it, it is kept alive.
    """

    def __init__(self, client: AsyncClient, core: SessionCore, timeout_s: float) -> None:
        super().__init__(core)
        self._client = client
        self._timeout_s = timeout_s
        self._stream = client._connection.stream(core, client._open_stream)
        weakref.finalize(self, self._stream.cancel)

    def turn(
        self, input: TurnInput = None, /, *, timeout_s: float | None = None, **options: Unpack[TurnOptions]
    ) -> AsyncTurn:
        """Begins a turn: appends the input and generates. Not awaited itself; iterate over what it returns.

        Args:
            input: text (or its UTF-8 bytes); token ids as a sequence or an integer array ``[n]``; embeddings as a
                floating array ``[n, hidden]``; None to go on generating (with ``max_tokens``) or only to keep alive.
            timeout_s: seconds from now in which the turn must end; the session's unless told.
            options: see :class:`TurnOptions`.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire.
            MicroturnError: when the session is closed or lost. What the server refuses is raised by the iterator.
        """
        tensor = encode_input(input)
        with self._stream.lock:
            pending = self._core.begin_turn(tensor, options, self._timeout_s if timeout_s is None else timeout_s)
            self._stream.flush()
        return AsyncTurn(self, pending)

    async def append(
        self, input: TurnInput, /, *, timeout_s: float | None = None, **options: Unpack[AppendOptions]
    ) -> Status:
        """Appends the input, generates nothing, and waits until that is done.

        Raises:
            MicroturnError: when the turn failed, in which case nothing was appended.
        """
        return await self.turn(input, timeout_s=timeout_s, max_tokens=0, **options).wait()

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

    async def interrupt(
        self,
        *,
        heard_tokens: int | None = None,
        heard_text: str | None = None,
        heard_chars: int | None = None,
        at: int | None = None,
        timeout_s: float | None = None,
    ) -> Status:
        """Barge-in: stops what runs, and cuts the last answer, running or finished, behind what was heard of it.

        What other turns have appended behind that answer is appended again, in its order; what waited to be answered is
        not answered any more, and ends as ``interrupted``.

        Args:
            heard_tokens: how many tokens of the last answer were heard.
            heard_text: the text of it that was heard; the token in which it ends is kept.
            heard_chars: how many characters that is.
            at: the absolute position behind the last token that was heard, for who plays the answers of several turns.
                With none of the four, all counts as heard that was handed out.
            timeout_s: seconds in which this must be done; the session's unless told.

        Returns:
            The status after the cut.

        Raises:
            InvalidArgument: more than one of the four, or more than was handed out.
            MicroturnError: when the session is closed or lost; :class:`TurnTimeout` when it takes too long.
        """
        with self._stream.lock:
            cut = self._core.begin_interrupt(
                self._timeout_s if timeout_s is None else timeout_s,
                heard_tokens=heard_tokens,
                heard_text=heard_text,
                heard_chars=heard_chars,
                at=at,
            )
            self._stream.flush()
        return await AsyncTurn(self, cut).wait()

    async def rewind(self, *, to: int, timeout_s: float | None = None) -> Status:
        """Cuts the context back to its first ``to`` tokens, once the turns before it are done.

        Raises:
            FailedPrecondition: that is behind its end, or in what a window has evicted.
        """
        return await self.turn(None, timeout_s=timeout_s, max_tokens=0, rewind_to=to).wait()

    async def fork(self) -> AsyncSession:
        """A new session that goes on from this one's context and shares its KV; from then on each is its own.

        A turn that runs is not in it. The branch has this session's options, its seed and its key.

        Raises:
            MicroturnError: when it cannot be opened.
        """
        with self._stream.lock:
            core, opening = self._core.branch(new_session_id(), self._timeout_s)
        branch = self._client._new_session(core, self._timeout_s)
        with branch._stream.lock:
            branch._stream.flush()
        await AsyncTurn(branch, opening).wait()
        return branch

    async def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> Status | None:
        """Ends the session on the server, behind the turns that are on the wire, and closes its stream.

        Returns:
            The server's last status; None when it did not confirm within ``timeout_s`` seconds, or held no session. It
            ends by itself then, when its idle time is over.
        """
        return await self._finish_close(self._begin_close(timeout_s))

    def _begin_close(self, timeout_s: float) -> PendingTurn | None:
        with self._stream.lock:
            end = self._core.begin_close(timeout_s)
            self._stream.flush()
            return end

    async def _finish_close(self, end: PendingTurn | None) -> Status | None:
        try:
            return None if end is None else await AsyncTurn(self, end).wait()
        except (MicroturnError, ValueError):
            return None
        finally:
            await self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
