"""What sessions find on this server, and how one begins: new, or as a branch of another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from microturn.errors import FailedPrecondition, InvalidArgument
from microturn.kv.layer_groups import LayerKind
from microturn.kv.page_table import PageTable
from microturn.kv.page_track import Track
from microturn.kv.pool import PagePool
from microturn.kv.state_track import StateTrack
from microturn.kv.window import DEFAULT_SINKS, Window
from microturn.sessions.history import History
from microturn.sessions.intake import append_input
from microturn.sessions.options import OF_ONE_TURN, SessionOptions, TurnOptions
from microturn.sessions.ownership import KeyHash
from microturn.sessions.results import Results
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn
from microturn.settings import Settings
from microturn.text.codec import CodecFactory


@dataclass(frozen=True)
class SessionEnvironment:
    """What a session finds here, new or restored.

    Attributes:
        settings: limits and defaults of sessions.
        model_fingerprint: of the model here.
        max_context: tokens that a session here may hold at most.
        no_window_reason: why no session can have a window here; None when it can.
        pool: where its pages come from.
        new_codec: makes the codec of a session.
        clock: seconds, monotonic.
        kinds: of the model's attention layers.
        state_track: of its recurrent layers; None without any.
        files_fingerprint: of the model's files, whatever the type of the weights: what a server says of itself before
            it has loaded them.
    """

    settings: Settings
    model_fingerprint: str
    max_context: int
    no_window_reason: str | None
    pool: PagePool
    new_codec: CodecFactory
    clock: Callable[[], float]
    kinds: Sequence[LayerKind]
    state_track: StateTrack | None = None
    files_fingerprint: str | None = None

    @property
    def num_results(self) -> int:
        """Results of numbered turns that a session keeps."""
        return self.settings.max_queued_turns + 1

    def history_limit(self, *, keeps_all: bool) -> int | None:
        """See `Session.history_limit`."""
        return None if keeps_all else self.settings.history_bytes

    def new_table(self, window: Window | None) -> PageTable:
        """The pages, none, of a session with such a window."""
        slack, page_size = self.settings.window_slack, self.pool.page_size
        tracks: list[Track | StateTrack] = [Track.of(kind, window, slack, page_size) for kind in self.kinds]
        if self.state_track is not None:
            tracks.append(self.state_track)
        return PageTable(self.pool, tracks)

    def check_window(self, window: Window) -> None:
        """Checks that a session may have a window here.

        Raises:
            FailedPrecondition: it may not.
        """
        if self.no_window_reason is not None:
            raise FailedPrecondition(f"the session has a window, which is not exact here: {self.no_window_reason}")
        size = self.pool.page_size
        if window.num_sinks % size or window.slack % size:
            raise FailedPrecondition(
                f"the session's window has {window.num_sinks} sinks and {window.slack} tokens of slack, no whole pages "
                f"of {size}: resume it with the page_size that it was saved with"
            )

    def open_session(self, turn: Turn, parent: Session | None) -> Session:
        """The session that a START opens, with its input appended. It is not in the table of sessions yet.

        Args:
            turn: gets its options.
            parent: the session that it is a branch of.

        Raises:
            MicroturnError: why it cannot be opened; nothing has changed then.
        """
        request, asked = turn.request, turn.request.session_options
        defaults = {name: value for name, value in request.options.items() if name not in OF_ONE_TURN}
        seed = defaults.pop("seed", None)
        max_context = self._max_context_for(asked, self.max_context if parent is None else parent.max_context)
        window = self._window_for(asked, max_context) if parent is None else _window_of_branch(asked, parent)
        table = self.new_table(window)
        if parent is None:
            session = Session(
                id=request.session_id,
                history=History(self.new_codec(asked.tools)),
                table=table,
                defaults=TurnOptions().updated(defaults),
                seed=secrets.randbits(63) if seed is None else seed,
                max_context=max_context,
                window=window,
                history_limit=self.history_limit(keeps_all=asked.history == "whole"),
                idle_timeout_s=asked.idle_timeout_s or self.settings.idle_timeout_s,
                last_activity_s=request.arrived_s,
                results=Results(self.num_results),
                key=KeyHash.of(request.options.get("session_key")),
                tenant=request.options.get("tenant"),
                opened_s=request.arrived_s,
                epoch=next_epoch(),
                cache_salt=asked.cache_salt if self.settings.share_prefixes else None,
                priority=asked.session_priority,
            )
        else:
            session = replace(
                parent.at_rest(table),
                id=request.session_id,
                defaults=parent.defaults.updated(defaults),
                seed=parent.seed if seed is None else seed,
                max_context=max_context,
                idle_timeout_s=asked.idle_timeout_s or parent.idle_timeout_s,
                last_activity_s=request.arrived_s,
                results=Results(self.num_results),
                cache_salt=None,
                opened_s=request.arrived_s,
                origin="fork",
                epoch=next_epoch(),
                priority=asked.session_priority or parent.priority,
                num_turns=0,
                is_closing=False,
            )
        turn.resolve_options(session.defaults)
        turn.model_fingerprint = self.model_fingerprint or None
        append_input(session, turn, max_tokens=turn.max_tokens)
        if parent is not None:
            session.share_kv_of(parent, turn.len_before)
        return session

    def _max_context_for(self, asked: SessionOptions, default: int) -> int:
        if asked.max_context is None:
            return default
        if asked.max_context > self.max_context:
            raise InvalidArgument(f"option 'max_context' is at most {self.max_context} here")
        return asked.max_context

    def _window_for(self, asked: SessionOptions, max_context: int) -> Window | None:
        if asked.overflow != "window":
            if any(option is not None for option in (asked.sink_tokens, asked.window_tokens, asked.history)):
                raise InvalidArgument("sink_tokens, window_tokens and history come with overflow=window")
            return None
        if self.no_window_reason is not None:
            raise InvalidArgument(f"overflow=window is not exact with this model: {self.no_window_reason}")
        window = Window.of_whole_pages(
            DEFAULT_SINKS if asked.sink_tokens is None else asked.sink_tokens,
            asked.window_tokens or max_context // 2,
            self.settings.window_slack,
            page_size=self.pool.page_size,
        )
        if window.max_kept >= max_context:
            raise InvalidArgument(
                f"{window.num_sinks} sinks, {window.length} tokens of window and twice {window.slack} of slack leave "
                f"no room for a turn: max_context is {max_context}"
            )
        return window


def _window_of_branch(asked: SessionOptions, parent: Session) -> Window | None:
    window_options = (asked.overflow, asked.sink_tokens, asked.window_tokens, asked.history)
    if asked.tools or asked.cache_salt or any(option is not None for option in window_options):
        raise InvalidArgument(
            "a branch has the tools, the prefix and the window of its parent: send no tools, no cache_salt, no "
            "overflow, sink_tokens, window_tokens or history"
        )
    return parent.window


def next_epoch(epoch: int = 0) -> int:
    """An epoch above another and above all that were given before: the milliseconds since 1970.

    So a session that is opened under the id of an earlier one, or taken up from a snapshot, has a higher epoch than any
    copy of the earlier one, whenever that is made: copies count on by one.
    """
    return max(epoch + 1, time.time_ns() // 1_000_000)
