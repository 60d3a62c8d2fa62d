"""A session: one growing sequence, its KV, and the turns that it has.

It is *running* while it has a turn, *parked* while it has none (`lifecycle` draws the states), and keeps its pages as
long as no running one needs them. Then it has a copy elsewhere (`tiers`), or is computed again with its next turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from microturn.kv.page_table import PageTable
from microturn.kv.stored import Place, StoredKV
from microturn.kv.window import Window
from microturn.sessions.beat import Beat
from microturn.sessions.context import Context
from microturn.sessions.history import History
from microturn.sessions.options import TurnOptions
from microturn.sessions.ownership import KeyHash, sharing_salt
from microturn.sessions.results import Results
from microturn.sessions.speculation import Speculation
from microturn.sessions.token_counts import TokenCounts
from microturn.sessions.turn import SessionId, Turn
from microturn.text.codec import Codec


# With slots: more than thirty attributes would be in a dictionary of each object, and steps read them all the time.
@dataclass(eq=False, slots=True, weakref_slot=True)
class Session:
    """One growing sequence.

    Attributes:
        history: its tokens and its text.
        table: its pages. The last token of a context is never in the cache: its KV comes with the next forward pass,
            so that there is always a token to generate from.
        stored: its KV while that is outside the pool; the table is empty or being filled until this is None again.
        defaults: turn options that START set.
        seed: of the sampling, unless a turn brings its own.
        max_context: tokens it may hold; with a window those that it may hold at once.
        window: what its tokens see; None is all that came before.
        idle_timeout_s: silence after which it expires.
        last_activity_s: when either side was last heard of.
        results: of its numbered turns.
        key: what every turn must bring.
        tenant: that a trusted proxy says it was opened for.
        cache_salt: which sessions of its tenant share the pages of their first turns; None is none.
        opened_s, origin: when it was opened, and how: `new`, `fork` or `resumed`.
        epoch: rises with every copy of the session that is saved; the copy of a lower one is out of date.
        base_epoch: that it had when it came here. Whoever claims a later one has taken it up since.
        beat: when its turns come.
        priority: beats by which its turns are due earlier than others.
        num_dropped: tokens behind the sinks that a rewind cannot reach any more.
        history_limit: bytes of these that are kept, so that KV can be computed again; None is all of them.
        is_rebuilt: its KV was computed again from less than all, and no status has said so yet.
        counts: of the tokens in its context, for turns with penalties.
        speculation: its drafts, for turns that speculate.
        running: the only turn that may change the session.
        queued: turns that wait behind it.
        num_turns: turns that the history is made of; the number of the next.
        is_closing: END has come; no turn is taken any more.
        held_as: the epoch of the copy that is to go on elsewhere; its turns wait. None while it is not held.
        kv_floor: KV from here on may be another than was saved of the session that goes on.
        context, codec: its tokens and its text, those of `history`.
    """

    id: SessionId
    history: History
    table: PageTable
    defaults: TurnOptions
    seed: int
    max_context: int
    idle_timeout_s: float
    last_activity_s: float
    results: Results
    key: KeyHash = field(default_factory=lambda: KeyHash.of(None))
    tenant: str | None = None
    cache_salt: str | None = None
    opened_s: float = 0.0
    origin: str = "new"
    epoch: int = 0
    base_epoch: int = 0
    stored: StoredKV | None = None
    beat: Beat = field(default_factory=Beat)
    priority: int = 0
    window: Window | None = None
    num_dropped: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)
    speculation: Speculation = field(default_factory=Speculation)
    history_limit: int | None = None
    is_rebuilt: bool = False
    running: Turn | None = None
    queued: deque[Turn] = field(default_factory=deque)
    num_turns: int = 0
    is_closing: bool = False
    held_as: int | None = None
    kv_floor: int = 0
    context: Context = field(init=False)
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.context, self.codec = self.history.context, self.history.codec
        self.base_epoch = self.base_epoch or self.epoch

    @property
    def prefix_salt(self) -> str | None:
        """Equal for those sessions alone that share prefixes: of one tenant, or of none, and of one `cache_salt`."""
        return None if self.cache_salt is None else sharing_salt(self.tenant, self.cache_salt)

    @property
    def state(self) -> str:
        """What it does, as operators are told."""
        if self.is_closing:
            return "closing"
        return "parked" if self.running is None or self.running.is_paused else "running"

    @property
    def rests(self) -> bool:
        """Whether it is parked, goes on, and is not held."""
        return self.state == "parked" and self.held_as is None

    @property
    def kv_place(self) -> str:
        """Where its KV is, as operators are told; `tokens` is nowhere: it is computed (again) with the next turn."""
        if not self.kv_len:
            return "tokens"
        if self.stored is None:
            return "device"
        return "disk" if self.stored.image.place in (Place.DISK, Place.READING) else "host"

    @property
    def open_turns(self) -> list[Turn]:
        """The turns that have not been answered, in their order."""
        return [*self.queued] if self.running is None else [self.running, *self.queued]

    @property
    def kv_target(self) -> int:
        """Tokens that must be in the cache before the running turn can go on or end."""
        assert self.running is not None
        if self.running.generates:
            return len(self.context)
        # A turn that appends nothing needs nothing, even where the session has lost its pages.
        appends = self.running.num_input and not self.running.options.count_only
        return len(self.context) - 1 if appends else 0

    @property
    def committed_len(self) -> int:
        """First tokens that stay whether the running turn ends or is undone."""
        return len(self.context) if self.running is None else self.running.len_before

    @property
    def kv_len(self) -> int:
        """Tokens whose KV there is, in the pool or outside it."""
        return self.table.kv_len if self.stored is None else self.stored.kv_len

    @property
    def num_pending(self) -> int:
        """Tokens that the running turn has still to compute."""
        return self.context.num_kept_between(self.kv_len, self.kv_target)

    @property
    def num_computable(self) -> int:
        """Tokens of these that one pass can compute: all of a row's see the same."""
        if self.window is None:
            return self.num_pending
        until = self.window.sees_less_from(self.kv_len)
        if self.kv_len < self.window.num_sinks and self.context.num_forgotten:
            until = self.window.num_sinks
        return min(self.num_pending, until - self.kv_len)

    def at_rest(self, table: PageTable) -> Session:
        """A copy, with an empty table, as of the last committed point: that before the running turn."""
        return replace(
            self,
            history=self.history.fork(None if self.running is None else self.running.checkpoint),
            table=table,
            stored=None,
            beat=Beat(),
            counts=TokenCounts(),
            speculation=Speculation(),
            results=self.results.copy(),
            running=None,
            queued=deque(),
            held_as=None,
            num_turns=self.num_turns if self.running is None else self.running.number,
        )

    def share_kv_of(self, parent: Session, context_len: int) -> None:
        """Begins with the full pages of another session whose history this one had up to a length.

        The tokens behind the last full page are computed again. Of KV outside the pool both have the same copy.
        """
        kv_len = min(parent.kv_len, max(0, min(context_len, parent.committed_len) - 1))
        if parent.stored is None:
            self.table.adopt_from(parent.table, kv_len)
        elif kv_len:
            self.stored = parent.stored.branch(kv_len)

    def cut_kv(self, context_len: int) -> None:
        """Gives up what was made of all behind a length: the KV, that of the last token before it too, and counts."""
        self.counts.cut(context_len)
        self.give_up_pages(kv_len := max(0, context_len - 1))
        self.kv_floor = min(self.kv_floor, kv_len)
        if self.stored is not None:
            self.stored.cut(kv_len)
            if not self.stored.kv_len:
                self.drop_kv()

    def reserve(self, num_tokens: int) -> bool:
        """Takes the pages for KV that is to come back, and for so many tokens behind it; False if there are too few."""
        if self.stored is not None and self.table.is_empty and not self.stored.place_in(self.table):
            return False
        return self.table.reserve(self.table.kv_len + num_tokens)

    def num_pages_with(self, num_tokens: int) -> int:
        """Pages that it needs for its KV, wherever that is now, and for so many tokens behind it."""
        state = self.table.save() if self.stored is None or not self.table.is_empty else self.stored.state
        return state.num_pages_with(num_tokens)

    def drop_stored(self) -> None:
        """Has done with KV outside the pool."""
        if self.stored is not None:
            self.stored.release()
            self.stored = None

    def drop_kv(self) -> None:
        """Gives up all KV, wherever it is."""
        self.give_up_pages()
        self.drop_stored()

    def give_up_pages(self, kv_len: int = 0) -> None:
        """Gives up the pages of all tokens from position `kv_len` on; copies into them land before new owners write."""
        if self.stored is not None and kv_len < self.table.kv_len:
            self.stored.load_transfer.precede_steps()
        self.table.truncate(kv_len)

    @property
    def room(self) -> int:
        """Tokens that a turn may append and generate."""
        return self.max_context - (len(self.context) if self.window is None else self.window.max_kept)

    @property
    def max_shared(self) -> int | None:
        """First tokens whose KV is that of any other session with the same tokens; None is all of them."""
        return None if self.window is None else self.window.max_visible

    @property
    def least_rewind(self) -> int:
        """The first position that a rewind can reach."""
        return 0 if self.window is None else self.window.shortest_without(self.num_dropped)

    def evict(self) -> None:
        """Gives up what no token will see any more, wherever the running turn ends or is undone.

        Of layers with a window of their own it keeps what a cut back into the last answer needs: what is heard lags
        behind what is generated. A cut further back has everything computed again.
        """
        if self.stored is None and self.table.slides:
            has_answer = self.running is None and self.window is None
            self.table.slide(self.history.answer_start if has_answer else self.committed_len)
        if self.window is None:
            return
        num_droppable = self.window.droppable(self.committed_len)
        if num_droppable > self.num_dropped:
            self.num_dropped = num_droppable
            self.history.forget_marks(self.least_rewind)
            self.history.forget_inputs(self.window.num_sinks, num_droppable, self.window.slack, self.history_limit)
        if self.stored is None:
            self.table.evict(min(self.num_dropped, self.window.droppable(self.table.kv_len)))

    def begin_behind_forgotten(self) -> None:
        """Where KV is lost whose tokens are forgotten, goes on from what is kept: the sinks, and the window.

        The sinks are computed first, if they have to be; then comes what stands behind the gap.
        """
        if not self.context.num_forgotten or self.kv_len >= self.context.first_kept:
            return
        assert self.window is not None, "a context without a window forgets nothing"
        num_sinks = self.window.num_sinks
        if self.stored is not None:
            self.drop_kv()
        elif self.table.kv_len > num_sinks:
            self.table.truncate(num_sinks)
        if self.table.kv_len == num_sinks:
            self.table.begin_behind(self.context.first_kept)
            self.is_rebuilt = True

    @property
    def expires_s(self) -> float:
        return self.last_activity_s + self.idle_timeout_s

    def check_integrity(self) -> None:
        """Asserts that KV, context and turns agree."""
        self.table.check_integrity()
        assert max(self.table.kv_len, self.kv_len) <= max(0, len(self.context) - 1), "KV beyond the context"
        assert self.running is not None or self.held_as or not self.queued, "a queued turn, and none runs"
        assert self.window or len(self.context) <= self.max_context, "a context beyond its limit"
        assert self.window or not self.context.num_forgotten, "forgotten without a window"
        assert self.context.first_kept <= self.least_rewind, "what a rewind can reach is forgotten"
        self.history.check_integrity()
        self.counts.check_integrity(self.context)
