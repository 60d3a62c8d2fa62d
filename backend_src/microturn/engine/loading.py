"""From settings to an engine: load, check, size the pool, warm up. All that must be done before the first turn."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
from transformers import AutoConfig

from microturn.engine.engine import Engine
from microturn.engine.step_time import StepTimeModel
from microturn.engine.wiring import build_engine, pages_of_context
from microturn.errors import InvalidArgument
from microturn.model import runner
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.cpu.container_limits import num_cpus
from microturn.model.fingerprint import model_fingerprint
from microturn.model.loaded import Loaded
from microturn.model.parallel.followers import Followers
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.settings import Settings
from microturn.snapshots.arrivals import Fetch
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.opening import open_snapshots
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText

log = logging.getLogger(__name__)

# Wants all filters of sampling.
_WARM_UP_ROW = SamplingRow(TurnOptions(temperature=1.0, top_k=1, top_p=0.5, min_p=0.5), seed=0, position=0)


@dataclass(frozen=True)
class Prepared:
    """A model that is loaded, checked and warm.

    Attributes:
        loaded: its runner and pages.
        text: its tokenizer and chat template.
        passes: tokens and seconds of forward passes whose kernels were warm.
        device: where it computes, for people.
        num_threads: of a forward pass.
    """

    loaded: Loaded
    text: ModelText
    passes: Sequence[tuple[int, float]]
    device: str
    num_threads: int


def start_engine(settings: Settings, fetch: Fetch | None = None) -> Engine:
    """Loads a model and runs its engine, both on one new thread.

    Each thread that computes gets an OpenMP team of its own, and a second team makes the runtime wait passively: a step
    took 1.7 times as long when another thread had loaded the model.

    Args:
        settings: how to run.
        fetch: brings sessions from other servers; None if there are none.

    Raises:
        InvalidArgument: as `load_engine`.
    """
    loaded: Future[Engine] = Future()

    def live() -> None:
        try:
            prepared, engine = _load(settings, fetch)
            # Torch computes parts of other layers, by teams of several sizes: the threads that OpenMP then starts again
            # would inherit this one's CPU.
            if settings.bind_threads and prepared.loaded.layers == "compiled":
                from microturn.model.cpu.thread_binding import bind_threads  # what only a CPU needs: Numba

                bind_threads()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        try:
            engine.run()
        finally:
            prepared.loaded.runner.close()

    threading.Thread(target=live, name="microturn-engine", daemon=True).start()
    return loaded.result()


def load_engine(settings: Settings) -> Engine:
    """Loads a model and builds an engine over it; the same thread should run it.

    Raises:
        InvalidArgument: when the model cannot be loaded or served, or the settings do not fit it.
    """
    _, engine = _load(settings, None)
    return engine


def _load(settings: Settings, fetch: Fetch | None) -> tuple[Prepared, Engine]:
    snapshots = open_snapshots(settings)
    prepared = prepare(settings)
    try:
        return prepared, build(prepared, settings, snapshots, fetch)
    except BaseException:
        prepared.loaded.runner.close()
        raise


def prepare(settings: Settings) -> Prepared:
    """Loads a model, checks it and warms it up.

    Raises:
        InvalidArgument: as `load_engine`, but for settings that do not fit it.
    """
    if not settings.model_dir:
        raise InvalidArgument("setting 'model_dir' is missing: name a Hugging Face model directory")
    num_threads = max(1, (settings.num_threads or num_cpus()) // settings.tensor_parallel)
    device = _device(settings.device)
    torch.set_num_threads(num_threads)
    _import_configuration(settings.model_dir)
    with ThreadPoolExecutor(1, "microturn-text") as beside, _followers(settings, device) as followers:
        beginning = beside.submit(ModelText.from_directory, Path(settings.model_dir))
        if device.type == "cpu":
            loaded = _load_on_cpu(settings, num_threads, followers)
        else:
            loaded = _load_on_gpu(settings, device, followers)
        text = beginning.result()
        if text.has_ids_beyond(loaded.runner.vocab_size):  # a pass with one of them would fail for all its rows
            text = ModelText.from_directory(Path(settings.model_dir), loaded.runner.vocab_size)
        # A pass does not look whether its pages are in the pool.
        pages_of_context(loaded.runner.kv, loaded.pool, loaded.max_context, settings.max_batch_tokens)
        passes = warm_up(loaded.runner, settings.max_batch_tokens, loaded.max_context)
    name = str(device) if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Prepared(loaded, text, passes, name, num_threads)


def build(
    prepared: Prepared,
    settings: Settings,
    snapshots: SnapshotDirectory | None = None,
    fetch: Fetch | None = None,
) -> Engine:
    """An engine over a model that was prepared with the same settings.

    Raises:
        InvalidArgument: the settings do not fit it.
    """
    loaded, text = prepared.loaded, prepared.text
    engine = build_engine(
        settings,
        loaded.runner,
        loaded.pool,
        max_context=loaded.max_context,
        new_codec=partial(SessionText, text),
        prepare_text=text.prepare,
        grammars=text.grammars(loaded.runner.vocab_size),
        eos_ids=text.eos_ids,
        control_ids=text.encoder.special_tokens.ids,
        model_fingerprint=model_fingerprint(settings.model_dir, loaded.weights),
        files_fingerprint=model_fingerprint(settings.model_dir),
        snapshots=snapshots,
        step_time=StepTimeModel(prepared.passes),
        fetch=fetch,
    )
    kv = loaded.runner.kv
    log.info(
        "%s on %s: context of %d tokens, %d pages of %d tokens for %d groups of layers (%s, %.1f GB), %s layers in %s, "
        "%s attention, %d threads",
        type(loaded.runner.model).__name__,
        prepared.device,
        loaded.max_context,
        loaded.pool.num_pages,
        loaded.pool.page_size,
        kv.groups.num_groups,
        loaded.kv_dtype,
        loaded.pool_bytes / 1e9,
        "transformers'" if loaded.runner.decoder is None else "fused",
        loaded.weights,
        loaded.attention,
        prepared.num_threads,
    )
    return engine


def _import_configuration(model_dir: str) -> None:
    """Imports what both the model's module and that of its tokenizer import, which two threads should not at once."""
    with suppress(Exception):  # who loads the model tells what is wrong
        AutoConfig.from_pretrained(model_dir, local_files_only=True)


def _device(wanted: str) -> torch.device:
    """Where the model is to compute; of several GPUs the first that this process sees.

    Raises:
        InvalidArgument: a GPU is wanted, and torch sees none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "finds no GPU, or no driver for it"
        raise InvalidArgument(f"setting 'device' cannot be cuda here: torch {torch.__version__} {why}")
    return torch.device("cuda", 0)


def _load_on_cpu(settings: Settings, num_threads: int, followers: Followers | None) -> Loaded:
    from microturn.model.cpu import loading  # what only a CPU needs: Numba

    runner.set_num_threads(num_threads)
    return loading.load(settings, followers)


def _load_on_gpu(settings: Settings, device: torch.device, followers: Followers | None) -> Loaded:
    if followers is not None:
        from microturn.model.parallel import gpu_loading  # what only a GPU needs

        return gpu_loading.load(settings, device, followers)
    from microturn.model.gpu import loading  # likewise

    return loading.load(settings, device)


@contextmanager
def _followers(settings: Settings, device: torch.device) -> Iterator[Followers | None]:
    """The processes of the other ranks, if there are any, which end where loading fails.

    They are started before this thread has others compute for it: all of those run on this rank's CPUs.

    Raises:
        InvalidArgument: there are fewer GPUs.
    """
    size = settings.tensor_parallel
    if size == 1:
        yield None
        return
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidArgument(
            f"setting 'tensor_parallel' is at most {torch.cuda.device_count()} here, as many GPUs as torch sees"
        )
    followers = Followers(size, device.type, binds=device.type == "cpu" and settings.bind_threads)
    try:
        yield followers
    except BaseException:
        followers.close()
        raise
    followers.is_serving = True


def warm_up(model_runner: runner.ModelRunner, max_batch_tokens: int, max_context: int) -> list[tuple[int, float]]:
    """Runs the shapes that the first turns will have: kernels are compiled and memory is touched before, not then.

    Returns:
        Tokens and seconds of passes whose kernels were warm.
    """
    page_size = model_runner.kv.page_size
    # Ours on a CPU: the same for any number of tokens.
    has_same_kernels = model_runner.kv.device.type == "cpu" and model_runner.decoder is not None
    passes: list[tuple[int, float]] = []
    for num_tokens in sorted({1, min(16, max_context), min(max_batch_tokens, max_context)}):
        num_pages, unused = -(-num_tokens // page_size), count()
        first, *others = (
            RowPages(list(islice(unused, num_pages * kind.num_groups))) for kind in model_runner.kv.groups.kinds
        )
        states = model_runner.kv.new_state_pages(num_tokens, unused)
        batch = Batch([Row([0] * num_tokens, 0, first.pages, others=others, states=states)])
        if not passes or not has_same_kernels:
            draw(model_runner.run(batch), [_WARM_UP_ROW]).sampled()
        started_s = time.perf_counter()
        model_runner.run(batch).cpu()
        passes.append((num_tokens, time.perf_counter() - started_s))
    log.info(
        "warmed up with %d threads: %s",
        torch.get_num_threads(),
        ", ".join(f"{n} tokens in {s * 1e3:.0f} ms" for n, s in passes),
    )
    return passes
