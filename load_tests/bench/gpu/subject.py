"""What a section measures: an engine over a random model, ready to serve, and the roof over it."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from load_tests.bench.gpu.card import Card, settle
from load_tests.bench.gpu.ids_only import IdsOnly
from load_tests.bench.gpu.random_model import random_model
from load_tests.bench.gpu.roofline import Roofline
from microturn.bench.grown_sessions import GrownSessions
from microturn.engine.engine import Engine
from microturn.engine.loading import warm_up
from microturn.engine.step_time import StepTimeModel
from microturn.engine.wiring import build_engine
from microturn.errors import Unavailable
from microturn.model.gpu.loading import make_ready, weights_dtype
from microturn.model.loaded import Loaded
from microturn.settings import Settings


@dataclass(frozen=True)
class Subject:
    """One model, ready.

    Attributes:
        sessions: of its engine.
        loaded: the model and its pages.
        card: that it runs on.
        roofline: over its passes.
        ready_s: what it took to make, check and capture it.
        device_bytes: that are taken on the device; 0 on a CPU, where others take some too.
    """

    sessions: GrownSessions
    loaded: Loaded
    card: Card
    roofline: Roofline
    ready_s: float
    device_bytes: int

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that all sessions together can hold on the device."""
        pool = self.loaded.pool
        return pool.num_pages // self.loaded.runner.kv.groups.num_groups * pool.page_size

    def has_room(self, num_sessions: int, num_tokens: int) -> bool:
        """Whether so many sessions can hold so many tokens each."""
        page_size = self.loaded.pool.page_size
        rounded_up = -(-num_tokens // page_size) * page_size
        return num_tokens <= self.loaded.max_context and num_sessions * rounded_up <= self.num_pool_tokens


@contextmanager
def ready_subject(config: Mapping[str, Any], settings: Settings, device: torch.device, card: Card) -> Iterator[Subject]:
    """Makes a model and its engine; gives back all that they took.

    Args:
        config: of the model.
        settings: of the engine; they name no model.
        device: that it runs on.
        card: what was measured of it.
    """
    started_s = time.perf_counter()
    taken_before = _taken_bytes(device)
    loaded = make_ready(random_model(config, device, weights_dtype(settings)), settings)
    assert loaded.runner.decoder is not None, "layers of transformers' own have no roof that we know"
    engine = build_engine(
        settings,
        loaded.runner,
        loaded.pool,
        max_context=loaded.max_context,
        new_codec=lambda _tools: IdsOnly(),
        step_time=StepTimeModel(warm_up(loaded.runner, settings.max_batch_tokens, loaded.max_context)),
    )
    sessions = GrownSessions(engine)
    settle(device)
    # As the server does it: what lives for good is not looked through again and again.
    gc.collect()
    gc.freeze()
    try:
        roofline = Roofline(_weight_bytes(loaded), sessions.bytes_per_token, card.memory_bytes_per_s)
        ready_s = time.perf_counter() - started_s
        yield Subject(sessions, loaded, card, roofline, ready_s, _taken_bytes(device) - taken_before)
    finally:
        engine.stop()
        gc.unfreeze()


@contextmanager
def on_own_thread(engine: Engine) -> Iterator[None]:
    """Serves while others post; afterwards it is stepped by hand again. Where it fails, all turns do."""
    has_ended = threading.Event()

    def live() -> None:
        try:
            while not has_ended.is_set():
                engine.step(block=True)
        except Exception:
            traceback.print_exc()
            engine.stop()

    thread = threading.Thread(target=live, name="engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(Unavailable):  # it has failed
            engine.call(lambda _: has_ended.set())
        thread.join()


def release(device: torch.device) -> None:
    """Gives memory that nobody uses any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _weight_bytes(loaded: Loaded) -> int:
    decoder: Any = loaded.runner.decoder
    return int(decoder.weight_bytes)


def _taken_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
