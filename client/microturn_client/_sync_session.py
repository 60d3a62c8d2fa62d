# Generated from _aio_session.py by client/generate_sync.py: change that file, then run `make client-sync`.
"""One session, for threads: ``Session``. A shell around the session core."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from microturn_client._beat import Beat
from microturn_client._errors import MicroturnError
from microturn_client._events import Event, Resumed, Status
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._new_turn import begin_ask
from microturn_client._options import AppendOptions, MessageRole, TurnOptions
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._session_facts import SessionFacts
from microturn_client._session_state import DEFAULT_CLOSE_TIMEOUT_S, Timeouts
from microturn_client._sync_beat import turns_on_the_beat
from microturn_client._sync_turn import Turn
from microturn_client._tool_events import ToolCall, result_text
from microturn_client._transcript import TranscriptTurn
from microturn_client._wire import new_session_id

if TYPE_CHECKING:
    from microturn_client._sync import Client


_WITHDRAWN = "microturn: the input had not been sent, and is not appended"
_STAYS = "microturn: the input was on its way, and stays in the context unless the server refuses it"

OnResumed = Callable[[Resumed], object]


class Session(SessionFacts, Iterator[Event]):
    """One streaming session: a context that lives on the server and grows turn by turn.

    Made by :meth:`Client.session`; use it in a ``with`` block. Several threads may use it.
    Turns are answered in the order in which they were begun, each to its own iterator; those of :meth:`send` to the
    session itself, which is an iterator too. While a program holds it, it is kept alive; leaving the block ends it.
    """

    def __init__(self, client: Client, core: SessionCore, timeouts: Timeouts, on_resumed: OnResumed | None) -> None:
        super().__init__(core)
        self._client = client
        self._timeouts = timeouts
        self._on_resumed = on_resumed
        self._sent: deque[PendingTurn] = deque()
        self._stream = client._connection.stream(core, client._open_stream, weakref.WeakMethod(self._tell))
        weakref.finalize(self, self._stream.cancel)

    @property
    def transcript(self) -> tuple[TranscriptTurn, ...]:
        """The turns that have ended, in their order: what was given and answered, as far as this client knows.

        What was cut off is not in it. A session that was attached begins where this client took it up, and one that
        has outgrown :attr:`Recovery.max_transcript_bytes` with its younger half.
        """
        with self._stream.lock:
            return self._core.transcript.turns()

    def turn(
        self,
        input: TurnInput = None,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Begins a turn: appends the input and generates. Iterate over what it returns.

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
        return Turn(self, pending)

    def ask(
        self,
        message: TurnInput,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Begins the answer to a user's message: appends the message, and generates with ``role="assistant"``.

        Iterate over what it returns. The model needs a chat template.

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
        return Turn(self, answer)

    def tool_result(
        self,
        call: ToolCall,
        result: object,
        /,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
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
        return Turn(self, answer)

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

    def __next__(self) -> Event:
        """Waits for the next event of the turns of :meth:`send`, in their order; ends when the session is closed.

        Raises:
            MicroturnError: when one of these turns failed (those behind it may still be heard), or the session is lost.
        """
        event = self._stream.next_of(self._sent)
        if event is None and self._core.failure is not None:
            raise copy.copy(self._core.failure)
        if event is None:
            raise StopIteration
        return event

    def append(
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
            MicroturnError: when the turn failed, in which case nothing was appended.
        """
        turn = self.turn(input, timeout_s=timeout_s, total_timeout_s=total_timeout_s, max_tokens=0, **options)
        try:
            return turn.wait()
        except MicroturnError:
            raise
        except BaseException as error:
            with self._stream.lock:
                is_withdrawn = self._core.outbox.remove_unsent(turn._pending)
            error.add_note(_WITHDRAWN if is_withdrawn else _STAYS)
            raise

    def count_tokens(
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
        the turns before it; :meth:`Client.count_tokens` waits for none.

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
        return (self.append(input, timeout_s=timeout_s, **options)).usage.input_tokens

    def stream(
        self, source: Iterable[TurnInput], *, every_ms: float = 200.0, **options: Unpack[TurnOptions]
    ) -> Iterator[Event | Beat]:
        """Makes micro-turns of what a source yields: on each beat, one of all that came since the last.

        What comes while a turn runs waits for the next beat. Only so many chunks wait; then the source does. A beat on
        which nothing came has no turn.

        Args:
            source: an iterable of text, token ids, or arrays of embeddings ``[n, hidden]``.
                A thread of its own iterates over it.
            every_ms: milliseconds between two beats.
            options: of each turn.

        Yields:
            A :class:`Beat` as each micro-turn begins, then its events.

        Raises:
            MicroturnError: when a turn fails.
        """
        return turns_on_the_beat(lambda given: self.turn(given, **options), iter(source), every_ms / 1e3)

    def interrupt(
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
                self._timeouts.silence_s if timeout_s is None else timeout_s,
                heard_tokens=heard_tokens,
                heard_text=heard_text,
                heard_chars=heard_chars,
                at=at,
            )
            self._stream.flush()
        return Turn(self, cut).wait()

    def rewind(self, *, to: int, timeout_s: float | None = None) -> Status:
        """Cuts the context back to its first ``to`` tokens, once the turns before it are done.

        Raises:
            FailedPrecondition: that is behind its end, or in what a window has evicted.
        """
        return self.turn(None, timeout_s=timeout_s, max_tokens=0, rewind_to=to).wait()

    def fork(self) -> Session:
        """A new session that goes on from this one's context and shares its KV; from then on each is its own.

        A turn that runs is not in it. The branch has this session's options, its seed and its key.

        Raises:
            MicroturnError: when it cannot be opened.
        """
        with self._stream.lock:
            core, opening = self._core.branch(new_session_id(), self._timeouts.silence_s)
        branch = self._client._new_session(core, *self._timeouts, self._on_resumed)
        with branch._stream.lock:
            branch._stream.flush()
        Turn(branch, opening).wait()
        return branch

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> Status | None:
        """Ends the session on the server, behind the turns that are on the wire, and closes its stream.

        Returns:
            The server's last status; None when it did not confirm within ``timeout_s`` seconds, or held no session. It
            ends by itself then, when its idle time is over.
        """
        return self._finish_close(self._begin_close(timeout_s))

    def _begin_close(self, timeout_s: float) -> PendingTurn | None:
        with self._stream.lock:
            end = self._core.begin_close(timeout_s)
            self._stream.flush()
            return end

    def _finish_close(self, end: PendingTurn | None) -> Status | None:
        try:
            return None if end is None else Turn(self, end).wait()
        except (MicroturnError, ValueError):
            return None
        finally:
            self._stream.close()

    def _tell(self, event: Resumed) -> None:
        if self._on_resumed is not None:
            self._on_resumed(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
