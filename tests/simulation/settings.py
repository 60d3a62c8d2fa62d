"""How a server of a run is set: the product's defaults, and around them what is drawn otherwise.

Each setting is its default in most of the runs, and no default is another in all of them: faults hide behind what users
have. What is scarce is scarce often: a pool as small as one context is the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

from microturn.kv.window import Window
from microturn.settings import Settings
from support.plain_turn import EOS_IDS, Limits

# What START of a session with a window asks for.
SINK_TOKENS = 4
WINDOW_TOKENS = 9

_PAGE_BYTES = 16  # of one token in the model that is a hash


@dataclass(frozen=True)
class Knobs:
    """What may be turned. As they stand here they are the product's defaults, or as a server most often is.

    Attributes:
        max_context: what the model was trained for.
        pool_contexts: contexts that the pool holds.
        extra_pages: and pages beside.
        host_tier_pages: what the host tier holds.
        has_disk_tier: whether there is a disk tier.
        disk_tier_pages: what it holds.
        has_snapshots: whether sessions outlive a server that stops.
        history_bytes: what is kept behind a session's window.
        num_slots: Triton's candidate slots.
        layer_window: the model has layers that see less.
        is_asynchronous: the engine runs ahead, as on a GPU.
        copies_late: copies of KV are under way while steps are made, as on a GPU.
        pass_ms: what a forward pass takes at least.
        late_ms: how late messages come at most.
        late_share: how many come late.
    """

    max_context: int = 128
    pool_contexts: int = 1
    extra_pages: int = 0
    page_size: int = 16
    max_batch_tokens: int = 256
    max_sessions: int = 256
    max_queued_turns: int = 8
    window_slack: int = 256
    idle_timeout_s: float = 60.0
    share_prefixes: bool = True
    host_tier_pages: int = 0
    has_disk_tier: bool = False
    disk_tier_pages: int = 64
    has_snapshots: bool = False
    history_bytes: int = 1 << 20
    num_slots: int = 65536
    layer_window: int = 0
    is_asynchronous: bool = False
    copies_late: bool = False
    pass_ms: float = 8.0
    late_ms: float = 0.0
    late_share: float = 0.0


# What a knob is where it is not its default, and how often that is.
_OTHERS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "max_context": (0.3, (64, 256)),
    "pool_contexts": (0.6, (2, 2, 3, 4, 8)),
    "extra_pages": (0.4, (1, 2, 3, 5)),
    "page_size": (0.3, (4, 8, 1)),
    "max_batch_tokens": (0.4, (4, 16, 64)),
    "max_sessions": (0.3, (2, 3, 5)),
    "max_queued_turns": (0.3, (1, 3)),
    "window_slack": (0.5, (4, 16)),
    "idle_timeout_s": (0.3, (3.0, 10.0)),
    "share_prefixes": (0.1, (False,)),
    "host_tier_pages": (0.4, (2, 8, 100)),
    "has_disk_tier": (0.25, (True,)),
    "disk_tier_pages": (0.3, (4, 16)),
    "has_snapshots": (0.4, (True,)),
    "history_bytes": (0.4, (0, 200)),
    "num_slots": (0.4, (4, 8, 16)),
    "layer_window": (0.15, (3, 8, 40)),
    "is_asynchronous": (0.25, (True,)),
    "copies_late": (0.15, (True,)),
    "pass_ms": (0.3, (1.0, 40.0)),
    "late_ms": (0.5, (20.0, 300.0)),
    "late_share": (0.5, (0.05, 0.3)),
}


def draw_knobs(seed: int) -> Knobs:
    """Knobs around the defaults. In one run of five all of them are the defaults."""
    if Random(f"defaults/{seed}").random() < 0.2:
        return Knobs()
    drawn = {}
    for name, (share, values) in _OTHERS.items():
        random = Random(f"knob/{name}/{seed}")  # a knob more changes no other
        if random.random() < share:
            drawn[name] = random.choice(values)
    return replace(Knobs(), **drawn)


def turned(knobs: Knobs) -> list[str]:
    """The names of those that are not their defaults."""
    return [field.name for field in fields(knobs) if getattr(knobs, field.name) != field.default]


@dataclass(frozen=True)
class Drawn:
    """A server's settings as the product has them, and what comes of them.

    Attributes:
        settings: without the directories.
        num_pages: of the pool, for each group of layers.
        max_context: of the model here.
        limits: what the plain engine is told.
        num_slots: Triton's.
    """

    settings: Settings
    num_pages: int
    max_context: int
    limits: Limits
    num_slots: int
    layer_window: int | None
    is_asynchronous: bool
    copies_late: bool
    pass_s: float
    token_s: float

    @classmethod
    def of(cls, knobs: Knobs) -> Drawn:
        """The settings that knobs stand for."""
        size = knobs.page_size
        context_pages = -(-knobs.max_context // size)
        window = Window.of_whole_pages(SINK_TOKENS, WINDOW_TOKENS, knobs.window_slack, page_size=size)
        settings = Settings(
            page_size=size,
            max_batch_tokens=knobs.max_batch_tokens,
            max_sessions=knobs.max_sessions,
            max_queued_turns=knobs.max_queued_turns,
            window_slack=knobs.window_slack,
            history_bytes=knobs.history_bytes,
            max_session_bytes=Settings.history_bytes,  # plain lists count no bytes: see test_engine_random.py
            idle_timeout_s=knobs.idle_timeout_s,
            share_prefixes=knobs.share_prefixes,
            host_tier_bytes=knobs.host_tier_pages * size * _PAGE_BYTES,
            disk_tier_dir="disk" if knobs.has_disk_tier else "",
            disk_tier_bytes=knobs.disk_tier_pages * size * _PAGE_BYTES,
            snapshot_dir="snapshots" if knobs.has_snapshots else "",
        ).within_slots(knobs.num_slots)
        return cls(
            settings=settings,
            num_pages=knobs.pool_contexts * context_pages + knobs.extra_pages,
            max_context=knobs.max_context,
            limits=Limits(
                max_context=knobs.max_context,
                max_sessions=settings.max_sessions,
                max_queued=knobs.max_queued_turns,
                idle_s=knobs.idle_timeout_s,
                eos_ids=EOS_IDS,
                window=None if window.max_kept >= knobs.max_context else window,
            ),
            num_slots=knobs.num_slots,
            layer_window=knobs.layer_window or None,
            is_asynchronous=knobs.is_asynchronous,
            copies_late=knobs.copies_late,
            pass_s=knobs.pass_ms / 1e3,
            token_s=knobs.pass_ms / 1e5,
        )

    def settings_in(self, directory: Path) -> Settings:
        """The settings of a server whose files are there."""
        disk = self.settings.disk_tier_dir
        return replace(self.settings, disk_tier_dir=str(directory / disk) if disk else "")
