"""One session that is told embeddings for hours, behind a short window: does it stay as fast and as small?

An encoder gives 25 embeddings a second; each turn brings one second of them (random, of the model's width) and
generates a token. What the window has evicted could be computed again from the inputs alone, and those of hours are
gigabytes: the server forgets them. In process, the engine runs in this process without a server, and memory and
processor time are this process's; else memory is that of all processes of a real server, which the client library
talks to.

Memory is what is resident, every hundred turns. Behind the first thousand turns, when all that is made once has been
made and the window has filled, it may not grow. The last thousand turns are held against the second thousand; and,
since others may be at work on the machine, a thousand more against as many of a fresh session that has filled its
window, one by one in alternation. With `--layers` the model has its first layers alone: what a session keeps does not
depend on their number.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median

import psutil
import torch
from tqdm import tqdm
from transformers import AutoConfig

from load_tests.bench.endless import SPAN, Talk
from load_tests.bench.pictures import draw_endless
from load_tests.bench.results import percentile, print_table, write_result
from microturn.engine.loading import load_engine
from microturn.serve.child import started_server
from microturn.sessions.inputs import EmbedInput
from microturn.settings import Settings
from microturn.zoo.store import resolve_model
from microturn_client import Client

NUM_OUTPUT = 1
KV_TOKENS = 8192
# Different enough that no two turns of a window are alike.
NUM_DIFFERENT = 64

# Takes a turn's embeddings, float32 [n, hidden]; says its milliseconds.
TakeTurn = Callable[[torch.Tensor], float]
OpenSession = Callable[[], TakeTurn]


def run_endless_embeds(
    model: str,
    num_turns: int,
    num_embeds: int,
    window_tokens: int,
    weights: str,
    *,
    num_layers: int | None,
    num_threads: int,
    with_server: bool,
) -> None:
    """Measures, prints a table, writes a JSON file and draws a picture.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: more than twice `SPAN`.
        num_embeds: of each turn.
        window_tokens: of the session.
        weights: see `Settings`.
        num_layers: of the model, the first ones; None is all.
        num_threads: see `Settings`.
        with_server: whether there is one.
    """
    if num_turns <= 2 * SPAN:
        raise SystemExit(f"--turns is more than {2 * SPAN}")
    width = AutoConfig.from_pretrained(resolve_model(model)).hidden_size
    different = torch.randn(NUM_DIFFERENT, num_embeds, width, generator=torch.Generator().manual_seed(1))
    turn_ms, cpu_ms, memory_mb, late_ms, fresh_ms = [], [], [], [], []
    settings = {"kv_tokens": str(KV_TOKENS), "weights": weights, "num_threads": str(num_threads)}
    taking = _through_server if with_server else _in_process
    with (
        _first_layers(resolve_model(model), num_layers) as directory,
        taking(directory, window_tokens, settings) as (open_session, processes),
    ):
        take_turn = open_session()
        for turn in tqdm(range(num_turns), desc="turns", unit="turn", mininterval=20):
            before_s = time.process_time()
            turn_ms.append(take_turn(different[turn % NUM_DIFFERENT].clone()))
            cpu_ms.append((time.process_time() - before_s) * 1e3)
            if len(turn_ms) % 100 == 0:
                memory_mb.append(sum(process.memory_info().rss for process in processes) / 1e6)
        take_fresh_turn = open_session()
        num_filling = -(-2 * window_tokens // num_embeds)
        for turn in tqdm(range(num_filling + SPAN), desc="in alternation", unit="turn", mininterval=20):
            given = different[turn % NUM_DIFFERENT]
            late_ms.append(take_turn(given.clone()))
            fresh_ms.append(take_fresh_turn(given.clone()))
    late, fresh = median(late_ms[-SPAN:]), median(fresh_ms[-SPAN:])
    second, last = turn_ms[SPAN : 2 * SPAN], turn_ms[-SPAN:]
    since = memory_mb[SPAN // 100 - 1 :]
    growth = max(since) / since[0] - 1
    where = "a server" if with_server else "this process"
    print(f"\n{num_turns} turns of {num_embeds} embeddings [{width}], window {window_tokens}, in {where}")
    print_table(
        ["", "second thousand turns", "last thousand turns"],
        [
            ["p50, ms", median(second), median(last)],
            ["p99, ms", percentile(second, 99), percentile(last, 99)],
            ["processor time of this process, p50, ms", median(cpu_ms[SPAN : 2 * SPAN]), median(cpu_ms[-SPAN:])],
        ],
    )
    print(f"\np50, last against second thousand: {median(last) / median(second):.3f}")
    print(f"p50 in alternation, after all that and of a fresh session: {late:.2f}, {fresh:.2f} ms: {late / fresh:.3f}")
    print(f"memory after the first thousand: {since[0]:.1f} MB; most since then {max(since):.1f} MB, {growth:+.2%}")
    result = {
        "protocol": __doc__,
        "model": model,
        "num_turns": num_turns,
        "num_embeds": num_embeds,
        "hidden_size": width,
        "window_tokens": window_tokens,
        "weights": weights,
        "num_layers": num_layers,
        "num_threads": num_threads,
        "with_server": with_server,
        "p50_ms": {"second": median(second), "last": median(last)},
        "cpu_p50_ms": {"second": median(cpu_ms[SPAN : 2 * SPAN]), "last": median(cpu_ms[-SPAN:])},
        "p50_ms_in_alternation": {"late": late, "fresh": fresh},
        "memory_growth": growth,
        "memory_mb": memory_mb,
        "turn_ms": [round(ms, 2) for ms in turn_ms],
    }
    name = "endless-embeds-server" if with_server else "endless-embeds"
    print("written:", write_result(name, result))
    print("drawn:  ", draw_endless(name, turn_ms, memory_mb, num_embeds + NUM_OUTPUT))


@contextmanager
def _first_layers(model: Path, num_layers: int | None) -> Iterator[Path]:
    """A model of the first layers of another, for as long as the block lasts."""
    if num_layers is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        for file in model.iterdir():
            (directory / file.name).symlink_to(file)
        (directory / "config.json").unlink()
        config = json.loads((model / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
        yield directory


@contextmanager
def _in_process(
    model: Path, window_tokens: int, settings: Mapping[str, str]
) -> Iterator[tuple[OpenSession, list[psutil.Process]]]:
    engine = load_engine(Settings.from_strings({"model_dir": str(model), "idle_timeout_s": "3600", **settings}))
    numbers = count(1)

    def open_session() -> TakeTurn:
        talk = Talk(engine, next(numbers), window_tokens)
        return lambda embeds: talk.turn(EmbedInput(embeds), NUM_OUTPUT)

    yield open_session, [psutil.Process()]


@contextmanager
def _through_server(
    model: Path, window_tokens: int, settings: Mapping[str, str]
) -> Iterator[tuple[OpenSession, list[psutil.Process]]]:
    said = [f"{name}={value}" for name, value in settings.items()]
    with started_server(str(model), *said) as server, Client(server.address) as client:

        def open_session() -> TakeTurn:
            session = client.session(overflow="window", window_tokens=window_tokens)

            def take_turn(embeds: torch.Tensor) -> float:
                started_s = time.perf_counter()
                session.turn(embeds.numpy(), max_tokens=NUM_OUTPUT, ignore_eos=True, temperature=1.0).wait()
                return (time.perf_counter() - started_s) * 1e3

            return take_turn

        root = psutil.Process(server.pid)
        yield open_session, [root, *root.children(recursive=True)]
