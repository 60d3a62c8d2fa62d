"""From settings to an engine: load, check, size the pool, warm up. All that must be done before the first turn."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from microturn import runner
from microturn.attention import native
from microturn.batch import Batch, Row, RowPages
from microturn.engine import Engine
from microturn.errors import InvalidArgument
from microturn.fingerprint import model_fingerprint
from microturn.kv_pool import PagePool
from microturn.kv_tensors import KV_DTYPES, KVTensors
from microturn.layer_groups import LayerGroups, LayerShape
from microturn.layers.weights import release_linears
from microturn.pace import Pace
from microturn.probe import Checked, check_model
from microturn.probe_int8 import Refused, int8_decoder
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText

log = logging.getLogger(__name__)

# A pool sized by itself stops here: it is memory that others on the machine may want.
_MOST_CONTEXTS = 32


def start_engine(settings: Settings) -> Engine:
    """Loads a model and runs its engine, both on one new thread.

    Each thread that computes gets an OpenMP team of its own, and a second team makes the runtime wait passively: a step
    took 1.7 times as long when another thread had loaded the model.

    Raises:
        InvalidArgument: as `load_engine`.
    """
    loaded: Future[Engine] = Future()

    def live() -> None:
        try:
            engine = load_engine(settings)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        engine.run()

    threading.Thread(target=live, name="microturn-engine", daemon=True).start()
    return loaded.result()


def load_engine(settings: Settings) -> Engine:
    """Loads a model and builds an engine over it; the same thread should run it.

    Raises:
        InvalidArgument: when the model cannot be loaded or served, or the settings do not fit it.
    """
    if not settings.model_dir:
        raise InvalidArgument("setting 'model_dir' is missing: name a Hugging Face model directory")
    snapshots = _open_snapshots(settings)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    runner.set_num_threads(num_threads)
    use_native = _use_native(settings)
    model = runner.load_model(settings.model_dir)
    layers = runner.trace_layers(model)
    # In float32, whatever the pages will keep: there a difference is a mistake and not a rounding.
    checked = check_model(model, layers, use_native=use_native, exact=settings.deterministic)
    if settings.deterministic and (checked.decoder is None or not use_native):
        lacking = "native attention" if checked.decoder else f"layers of ours for {type(model).__name__}"
        raise InvalidArgument(f"setting 'deterministic' cannot be true here: it needs {lacking}")
    checked, weights = _with_weights(settings.weights, model, layers, checked)
    model_text = ModelText.from_directory(Path(settings.model_dir))

    kv_dtype = KV_DTYPES["float32" if settings.kv_dtype == "auto" else settings.kv_dtype]
    groups = LayerGroups.of(layers)
    token_bytes = groups.num_groups * KVTensors.bytes_per_token(groups.slots, kv_dtype)
    pool, max_context = _size_pool(settings, model, token_bytes, groups.num_groups)
    kv = KVTensors(layers, pool.num_pages, pool.page_size, kv_dtype, groups=groups)
    model_runner = runner.ModelRunner(
        model,
        kv,
        use_native=use_native,
        decoder=checked.decoder,
        exact=settings.deterministic,
        accepts_embeds=checked.accepts_embeds,
        no_window_reason=checked.no_window_reason,
    )
    pace = _warm_up(model_runner, settings.max_batch_tokens, max_context)

    engine = Engine(
        settings,
        model_runner,
        pool,
        max_context=max_context,
        new_codec=partial(SessionText, model_text),
        eos_ids=model_text.eos_ids,
        model_fingerprint=model_fingerprint(settings.model_dir, weights),
        snapshots=snapshots,
        pace=pace,
    )
    log.info(
        "%s: context of %d tokens, %d pages of %d tokens for %d groups of layers (%s, %.1f GB), %s layers in %s, "
        "%s attention, %d threads",
        type(model).__name__,
        max_context,
        pool.num_pages,
        pool.page_size,
        groups.num_groups,
        str(kv_dtype).removeprefix("torch."),
        pool.num_pages * kv.bytes_per_page / 1e9,
        "transformers'" if checked.decoder is None else "fused",
        weights,
        "native" if use_native else "torch",
        num_threads,
    )
    return engine


def _open_snapshots(settings: Settings) -> SnapshotDirectory | None:
    if not settings.snapshot_dir:
        return None
    snapshots = SnapshotDirectory(Path(settings.snapshot_dir), ttl_s=settings.snapshot_ttl_s)
    snapshots.purge()
    return snapshots


def _use_native(settings: Settings) -> bool:
    reason = native.unavailable_reason()
    if settings.attention == "native" and reason is not None:
        raise InvalidArgument(f"setting 'attention' cannot be native here: {reason}")
    if settings.attention == "auto" and reason is not None:
        log.warning("attention through torch: %s", reason)
    return settings.attention != "torch" and reason is None


def _with_weights(
    wanted: str, model: PreTrainedModel, layers: Sequence[LayerShape], checked: Checked
) -> tuple[Checked, str]:
    """As checked in float32, with layers of the type of weights that a setting names, and that type.

    With 8-bit weights the model's own are freed.

    Raises:
        InvalidArgument: when 8-bit weights are wanted that the model does not run with.
    """
    if wanted == "float32":
        return checked, "float32"
    try:
        decoder = int8_decoder(model, layers, checked.decoder)
    except Refused as reason:
        if wanted == "int8":
            raise InvalidArgument(f"setting 'weights' cannot be int8 here: {reason}; set weights=float32") from None
        log.warning("weights in float32: %s", reason)
        return checked, "float32"
    release_linears(model)
    return replace(checked, decoder=decoder), "int8"


def _size_pool(settings: Settings, model: PreTrainedModel, token_bytes: int, num_groups: int) -> tuple[PagePool, int]:
    """The pool, and the longest context that a session may have.

    Args:
        settings: they say how large.
        model: it says what it was trained for.
        token_bytes: what a token takes that all layers keep.
        num_groups: of these layers; each takes a page for it.
    """
    trained = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or settings.max_context
    if settings.max_context > trained:
        raise InvalidArgument(f"setting 'max_context' is at most {trained}, what the model was trained for")
    max_context = settings.max_context or trained
    kv_tokens = settings.kv_tokens
    if kv_tokens == 0:
        free_bytes = psutil.virtual_memory().available
        kv_tokens = min(free_bytes // 2 // token_bytes, _MOST_CONTEXTS * max_context)
        max_context = max_context if settings.max_context else min(max_context, kv_tokens)
    num_pages = num_groups * -(-kv_tokens // settings.page_size)
    return PagePool(num_pages, settings.page_size), max_context


def _warm_up(model_runner: runner.ModelRunner, max_batch_tokens: int, max_context: int) -> Pace:
    """Runs the shapes that the first turns will have: kernels are compiled and memory is touched before, not then.

    Returns:
        How long the passes take, once all is warm.
    """
    page_size = model_runner.kv.page_size
    passes = []
    for num_tokens in sorted({1, min(16, max_context), min(max_batch_tokens, max_context)}):
        num_pages, unused = -(-num_tokens // page_size), count()
        first, *others = (
            RowPages(list(islice(unused, num_pages * kind.num_groups))) for kind in model_runner.kv.groups.kinds
        )
        batch = Batch([Row([0] * num_tokens, 0, first.pages, others=others)])
        model_runner.run(batch)
        started_s = time.perf_counter()
        model_runner.run(batch)
        passes.append((num_tokens, time.perf_counter() - started_s))
    log.info(
        "warmed up with %d threads: %s",
        torch.get_num_threads(),
        ", ".join(f"{n} tokens in {s * 1e3:.0f} ms" for n, s in passes),
    )
    return Pace(passes)
