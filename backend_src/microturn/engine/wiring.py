"""Builds an engine: its parts, from settings, a model and a pool of pages."""

from __future__ import annotations

import time
from collections.abc import Callable

from microturn.engine.engine import Engine
from microturn.engine.gauges import Gauges
from microturn.engine.inbox import Inbox
from microturn.engine.lifecycle import Lifecycle
from microturn.engine.maintenance import Maintenance
from microturn.engine.preparation import Preparation
from microturn.engine.request_handler import RequestHandler
from microturn.engine.scheduler import Scheduler
from microturn.engine.step_time import StepTimeModel
from microturn.engine.steps import Steps
from microturn.engine.suspects import Suspects
from microturn.engine.turn_grammars import TurnGrammars
from microturn.errors import InvalidArgument
from microturn.kv.pool import PagePool
from microturn.kv.prefix_cache import PrefixCache
from microturn.kv.tensors import KVTensors
from microturn.model.runner import Runner
from microturn.offload.background import BackgroundThreads, NewBackground
from microturn.offload.copies import KVCopies
from microturn.offload.opening import open_storage
from microturn.offload.tiers import Tiers
from microturn.sessions.accounts import ID_BYTES, ByteLimits
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.table import SessionTable
from microturn.settings import Settings
from microturn.snapshots.arrivals import Arrivals, Fetch
from microturn.snapshots.directory import SnapshotDirectory
from microturn.telemetry.recorder import Recorder
from microturn.text.codec import CodecFactory, PrepareText
from microturn.text.grammar import Grammars


def build_engine(
    settings: Settings,
    runner: Runner,
    pool: PagePool,
    *,
    max_context: int,
    new_codec: CodecFactory,
    eos_ids: frozenset[int] = frozenset(),
    control_ids: frozenset[int] = frozenset(),
    model_fingerprint: str = "",
    files_fingerprint: str | None = None,
    snapshots: SnapshotDirectory | None = None,
    step_time: StepTimeModel | None = None,
    prepare_text: PrepareText | None = None,
    grammars: Grammars | None = None,
    new_background: NewBackground = BackgroundThreads,
    fetch: Fetch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Builds an engine, which serves once a thread calls its `run`.

    Args:
        settings: how to run.
        runner: the model.
        pool: its pages.
        max_context: tokens that a session may hold at most; they fit the pool.
        new_codec: makes the codec of a new session.
        eos_ids: tokens that end a generation.
        control_ids: tokens that are no text, these or others.
        model_fingerprint: identifies the model in snapshots and KV files.
        files_fingerprint: see `SessionEnvironment`.
        snapshots: where saved sessions are that clients may resume; None is nowhere.
        step_time: what is known of the model's forward passes; None is nothing yet.
        prepare_text: tokenizes long text before its turn; None leaves all text to the codecs.
        grammars: of the model; None refuses what needs them.
        new_background: makes the threads for saved sessions, for text and for grammars.
        fetch: brings sessions from other servers; None if there are none.
        clock: seconds, monotonic.

    Raises:
        InvalidArgument: the pool does not hold one context.
    """
    kv = runner.kv
    num_context_pages = pages_of_context(kv, pool, max_context, settings.max_batch_tokens)
    inbox = Inbox()
    recorder = Recorder(settings)
    limits = ByteLimits.of(
        of_session=settings.max_session_bytes,
        of_tenant=settings.max_tenant_bytes,
        page_bytes=kv.groups.num_groups * kv.bytes_per_page,
        page_size=pool.page_size,
        max_context=max_context,
        hidden_size=runner.hidden_size,
        more=settings.history_bytes + ID_BYTES * runner.vocab_size,
        state_bytes=kv.state_bytes_of,
    )
    sessions = SessionTable(limits)
    sessions.watchers += (recorder,)
    prefixes = PrefixCache(pool)
    storage = open_storage(
        settings,
        kv,
        max_image_pages=num_context_pages,
        model_fingerprint=model_fingerprint,
        clock=clock,
        post=inbox.put,
    )
    tiers = Tiers(pool, kv, sessions, storage, clock)
    step_time = step_time or StepTimeModel()
    suspects = Suspects()
    scheduler = Scheduler(
        settings.max_batch_tokens,
        tiers,
        step_time,
        clock,
        suspects=suspects,
        # A recurrent state cannot be cut back to the part of a draft that holds.
        drafts=not runner.is_asynchronous and kv.states is None,
    )
    lifecycle = Lifecycle(sessions, prefixes, recorder, clock, settings.max_batch_tokens)
    steps = Steps(
        runner,
        scheduler,
        lifecycle,
        suspects,
        step_time,
        recorder,
        eos_ids=eos_ids,
        control_ids=control_ids,
        clock=clock,
    )
    environment = SessionEnvironment(
        settings,
        model_fingerprint,
        max_context,
        runner.no_window_reason,
        pool,
        new_codec,
        clock,
        kv.groups.kinds,
        kv.state_track,
        files_fingerprint,
    )
    copies = KVCopies(pool, kv, storage)
    # Several threads for files: a file that hangs holds up the client that asks for it, and no other.
    files = new_background(inbox.put, name="microturn-snapshots", num_threads=4)
    # Many clients at once look for sessions of a server that has died, and each asks all others.
    look_ups = files if fetch is None else new_background(inbox.put, name="microturn-look-ups", num_threads=16)
    texts = new_background(inbox.put, name="microturn-text", num_threads=1)
    compiling = new_background(inbox.put, name="microturn-grammars", num_threads=1)
    arrivals = Arrivals(
        settings, sessions, environment, snapshots, storage, kv.page_parts, files, look_ups, fetch, tiers.load_ahead
    )
    request_handler = RequestHandler(settings, runner, sessions, lifecycle, environment, recorder)
    preparation = Preparation(
        settings,
        sessions,
        request_handler,
        lifecycle,
        arrivals,
        new_codec,
        prepare_text,
        texts,
        TurnGrammars(grammars, compiling),
        max_context=max_context,
        clock=clock,
    )
    gauges = Gauges(recorder.metrics, sessions, lifecycle.running, pool, kv.bytes_per_page, storage, clock)
    maintenance = Maintenance(
        sessions,
        lifecycle,
        request_handler,
        preparation,
        arrivals,
        environment,
        copies,
        gauges,
        kv.bytes_per_page,
    )
    return Engine(
        settings=settings,
        clock=clock,
        inbox=inbox,
        pool=pool,
        sessions=sessions,
        prefixes=prefixes,
        tiers=tiers,
        copies=copies,
        scheduler=scheduler,
        steps=steps,
        lifecycle=lifecycle,
        arrivals=arrivals,
        preparation=preparation,
        maintenance=maintenance,
        backgrounds=(files, look_ups, texts, compiling),
        environment=environment,
        snapshots=snapshots,
        recorder=recorder,
    )


def pages_of_context(kv: KVTensors, pool: PagePool, max_context: int, max_batch_tokens: int) -> int:
    """Pages of the longest context.

    Raises:
        InvalidArgument: the pool does not hold it.
    """
    num_pages = kv.groups.num_groups * pool.num_pages_for(max_context)
    if kv.state_track is not None:
        num_pages += kv.state_track.most_pages(max_context, max_batch_tokens)
    if pool.num_pages < num_pages:
        raise InvalidArgument(
            f"a pool of {pool.num_pages} pages of {pool.page_size} tokens does not hold one context of "
            f"{max_context} tokens: raise kv_tokens or lower max_context"
        )
    return num_pages
