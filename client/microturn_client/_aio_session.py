"""One session, for asyncio: ``AsyncSession``. A shell around the session core."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from microturn_client._aio_turn import AsyncTurn
from microturn_client._aio_turns import AsyncTurns
from microturn_client._errors import MicroturnError
from microturn_client._events import Event, Resumed, Status
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._opening import begin_branch
from microturn_client._options import TurnOptions
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._timeouts import DEFAULT_CLOSE_TIMEOUT_S, Timeouts
from microturn_client._transcript import TranscriptTurn
from microturn_client._wire import new_session_id

if TYPE_CHECKING:
    from microturn_client._aio import AsyncClient


OnResumed = Callable[[Resumed], object]


class AsyncSession(AsyncTurns, AsyncIterator[Event]):
    """One streaming session: a context that lives on the server and grows turn by turn.

    Made by :meth:`AsyncClient.session`; use it in an ``async with`` block. Several tasks of one event loop may use it.
    Turns are answered in the order in which they were begun, each to its own iterator; those of :meth:`send` to the
    session itself, which is an iterator too. While a program holds it, it is kept alive; leaving the block ends it.
    """

    def __init__(
        self, client: AsyncClient, core: SessionCore, timeouts: Timeouts, on_resumed: OnResumed | None
    ) -> None:
        stream = client._connection.stream(core, client._open_stream, weakref.WeakMethod(self._tell))
        super().__init__(core, stream, timeouts)
        self._client = client
        self._on_resumed = on_resumed
        self._sent: deque[PendingTurn] = deque()
        weakref.finalize(self, self._stream.cancel)

    @property
    def transcript(self) -> tuple[TranscriptTurn, ...]:
        """The turns that have ended, in their order: what was given and answered, as far as this client knows.

        What was cut off is not in it. A session that was attached begins where this client took it up, and one that
        has outgrown :attr:`Recovery.max_transcript_bytes` with its younger half.
        """
        with self._stream.lock:
            return self._core.transcript.turns()

    def send(
        self,
        input: TurnInput = None,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> None:
        """Begins a turn whose events come to who iterates over the session: one task speaks, another one listens.

        Arguments and errors are those of :meth:`turn`.
        """
        tensor = encode_input(input)
        timeouts = self._timeouts.with_said(timeout_s, total_timeout_s)
        with self._stream.lock:
            self._sent.append(self._core.begin_turn(tensor, options, *timeouts))
            self._stream.flush()

    async def __anext__(self) -> Event:
        """Waits for the next event of the turns of :meth:`send`, in their order; ends when the session is closed.

        Raises:
            MicroturnError: when one of these turns failed (those behind it may still be heard), or the session is lost.
        """
        event = await self._stream.next_of(self._sent)
        if event is None and self._core.lifecycle.failure is not None and not self._core.lifecycle.is_closed:
            raise copy.copy(self._core.lifecycle.failure)
        if event is None:
            raise StopAsyncIteration
        return event

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
            heard_tokens: how many tokens of the last answer were heard; 0 also before the first of them has come.
            heard_text: the text of it that was heard; the token in which it ends is kept, and all that came in its
                message (``stream=False``, ``stream_interval_ms``).
            heard_chars: how many characters that is.
            at: the absolute position behind the last token that was heard, for who plays the answers of several turns.
                With none of the four, all counts as heard that was handed out.
            timeout_s: seconds for which this waits; the session's unless told. Where no server can be reached meanwhile
                it is done as soon as one is.

        Returns:
            The status after the cut.

        Raises:
            InvalidArgument: more than one of the four, or more than was handed out.
            MicroturnError: when the session is closed or lost; :class:`TurnTimeout` when it takes too long.
        """
        with self._stream.lock:
            cut = self._core.begin_interrupt(
                self._timeouts.silence_s if timeout_s is None else timeout_s,
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

        A turn that runs is not in it. The branch has this session's options, its seed and its key. Where the server has
        lost this session, the branch is told all of it, and :attr:`resumed` of the branch says so.

        Raises:
            MicroturnError: when it cannot be opened.
        """
        with self._stream.lock:
            core, opening = begin_branch(self._core, new_session_id(), self._timeouts.silence_s)
        branch = self._client._new_session(core, *self._timeouts, self._on_resumed)
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

    # ---- asyncio alone ----
    async def aclose(self) -> None:
        """The same as :meth:`close`, by the name that ``contextlib.aclosing`` calls."""
        await self.close()

    # ---- both ----
    def _tell(self, event: Resumed) -> None:
        if self._on_resumed is not None:
            self._on_resumed(event)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
