"""What the server, the adapter and the client add to the engine, per turn of one session.

Measured in one run, turn by turn in alternation: the engine alone in this process, and the server. Three figures:

* `around the engine`: wall time at the client less the engine's own `timing_ms.total` of the same turn. Paired, so the
  noise of the forward passes cancels.
* `keep-alive`: wall time of a turn that computes nothing: the whole way there and back.
* `difference`: median wall time through the server less the median of the engine alone. It carries also what the
  server's threads cost the engine's, and the noise of both.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from tqdm import tqdm

from load_tests.bench.results import percentile, print_table, write_result
from load_tests.bench.server import running_server
from microturn.engine import Engine
from microturn.errors import MicroturnError
from microturn.loading import start_engine
from microturn.model_store import resolve_model
from microturn.settings import Settings
from microturn.turn import TokenInput, Turn, TurnOutput, TurnRequest
from microturn_client import Client, Session, TurnEnd

NUM_INPUT, NUM_OUTPUT = 16, 8


def run_overhead(model: str, num_turns: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: turns of each side.
    """
    samples: dict[str, list[float]] = {"engine alone": [], "through the server": [], "around the engine": []}
    samples["keep-alive"] = []
    engine = start_engine(Settings(model_dir=str(resolve_model(model))))
    try:
        with running_server(model) as address, Client(address) as client, client.session() as session:
            for number in tqdm(range(num_turns), desc="turns", unit="turn", leave=False):
                given = random.Random(number).choices(range(1000, 40_000), k=NUM_INPUT)
                samples["engine alone"].append(_engine_turn(engine, given, is_first=number == 0))
                wall_ms, engine_ms = _server_turn(session, given)
                samples["through the server"].append(wall_ms)
                samples["around the engine"].append(wall_ms - engine_ms)
                samples["keep-alive"].append(_keep_alive(session))
    finally:
        engine.stop()
    rows: list[Sequence[object]] = [
        [name, *(percentile(values[1:], percent) for percent in (50, 90, 99))] for name, values in samples.items()
    ]
    difference = percentile(samples["through the server"][1:], 50) - percentile(samples["engine alone"][1:], 50)
    print(f"\none session, {NUM_INPUT} tokens in, {NUM_OUTPUT} out, {num_turns} turns; ms")
    print_table(["", "p50", "p90", "p99"], [*rows, ["difference", difference, "", ""]])
    result = {"protocol": __doc__, "model": model, "num_turns": num_turns, "difference_ms": difference, "ms": samples}
    print("written:", write_result("overhead", result))


class _Waiter:
    """A sink that lets its owner wait for the end."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: MicroturnError | None = None

    def put(self, output: TurnOutput) -> None:
        if output.status is not None:
            self.done.set()

    def fail(self, error: MicroturnError) -> None:
        self.error = error
        self.done.set()


def _engine_turn(engine: Engine, given: Sequence[int], *, is_first: bool) -> float:
    """Wall time in ms of a turn in this process."""
    waiter = _Waiter()
    started_s = time.perf_counter()
    options = {"max_tokens": NUM_OUTPUT, "ignore_eos": True}
    request = TurnRequest(1, TokenInput(tuple(given)), waiter, engine.clock(), start=is_first, options=options)
    engine.submit(Turn(request))
    waiter.done.wait()
    if waiter.error is not None:
        raise waiter.error
    return (time.perf_counter() - started_s) * 1e3


def _server_turn(session: Session, given: Sequence[int]) -> tuple[float, float]:
    """Wall time in ms of a turn through the server, and what the engine says it took of that."""
    started_s = time.perf_counter()
    for event in session.turn(list(given), max_tokens=NUM_OUTPUT, ignore_eos=True):
        if isinstance(event, TurnEnd):
            engine_ms = event.status.timing_ms.total
    return (time.perf_counter() - started_s) * 1e3, engine_ms


def _keep_alive(session: Session) -> float:
    started_s = time.perf_counter()
    session.turn(None, max_tokens=0).wait()
    return (time.perf_counter() - started_s) * 1e3
