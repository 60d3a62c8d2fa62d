"""What the server, the adapter and the client add to the engine, per turn.

One session, measured in one run, turn by turn in alternation: the engine alone in this process, and the server with
both clients, `AsyncClient` and the blocking `Client`. Figures:

* `around the engine`: wall time at the client less the engine's own `timing_ms.total` of the same turn. Paired, so the
  noise of the forward passes cancels.
* `keep-alive`: wall time of a turn that computes nothing: the whole way there and back. Behind a turn it finds cold
  caches, since each step reads all weights; back to back it does not.
* `a call that Triton answers alone`: whether the model takes turns. The same client, network and server, without
  sequences, another process and us: what no turn can be faster than.
* `difference`: median wall time through the server less the median of the engine alone. It carries also what the
  server's threads cost the engine's, and the noise of both.

Then many sessions at once, each with a turn every 200 ms as in the beat protocol, whether or not the machine can keep
up: what is around the engine there.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from tqdm import tqdm

from load_tests.bench.beat_level import BEAT_S
from load_tests.bench.results import percentile, print_table, write_result
from microturn.engine.engine import Engine
from microturn.engine.loading import start_engine
from microturn.errors import MicroturnError
from microturn.serve.child import running_server
from microturn.sessions.inputs import TokenInput
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest
from microturn.settings import Settings
from microturn.zoo.store import resolve_model
from microturn_client import AsyncClient, AsyncSession, Client, Session, TurnEnd

NUM_INPUT, NUM_OUTPUT = 16, 8
NUM_BEATING, BEAT_LEN, NUM_BEATS = 16, 4, 40
# Fewer than the server answers at once (see `answer_pace`).
NUM_BACK_TO_BACK = 60

Samples = dict[str, list[float]]


def run_overhead(model: str, num_turns: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: turns of each side.
    """
    engine = start_engine(Settings(model_dir=str(resolve_model(model))))
    try:
        with running_server(model) as address, Client(address) as client, client.session() as session:
            samples = asyncio.run(_one_session(engine, address, session, num_turns))
    finally:
        engine.stop()
    with running_server(model) as address:
        beat = f"around the engine, {NUM_BEATING} sessions on the beat"
        samples[beat] = asyncio.run(_on_beat(address))
    rows: list[Sequence[object]] = [
        [name, *(percentile(values[1:], percent) for percent in (50, 90, 99))] for name, values in samples.items()
    ]
    difference = percentile(samples["through the server"][1:], 50) - percentile(samples["engine alone"][1:], 50)
    print(f"\none session, {NUM_INPUT} tokens in, {NUM_OUTPUT} out, {num_turns} turns; ms")
    print_table(["", "p50", "p90", "p99"], [*rows, ["difference", difference, "", ""]])
    result = {"protocol": __doc__, "model": model, "num_turns": num_turns, "difference_ms": difference, "ms": samples}
    print("written:", write_result("overhead", result))


async def _one_session(engine: Engine, address: str, blocking: Session, num_turns: int) -> Samples:
    samples: Samples = defaultdict(list)
    async with AsyncClient(address) as client, client.session() as session:
        for number in tqdm(range(num_turns), desc="turns", unit="turn", leave=False):
            given = random.Random(number).choices(range(1000, 40_000), k=NUM_INPUT)
            samples["engine alone"].append(_engine_turn(engine, given, is_first=number == 0))
            wall_ms, engine_ms = await _turn(session, given, NUM_OUTPUT)
            samples["through the server"].append(wall_ms)
            samples["around the engine"].append(wall_ms - engine_ms)
            wall_ms, engine_ms = _blocking_turn(blocking, given)
            samples["around the engine, blocking client"].append(wall_ms - engine_ms)
            samples["keep-alive"].append(await _ms_of(lambda: session.turn(None, max_tokens=0).wait()))
            samples["a call that Triton answers alone"].append(await _ms_of(client.ready))
            started_s = time.perf_counter()
            blocking.turn(None, max_tokens=0).wait()
            samples["keep-alive, blocking client"].append((time.perf_counter() - started_s) * 1e3)
        for _ in range(NUM_BACK_TO_BACK):
            samples["keep-alive, back to back"].append(await _ms_of(lambda: session.turn(None, max_tokens=0).wait()))
    return samples


async def _ms_of(call: Callable[[], Awaitable[object]]) -> float:
    """Wall time of a call, in ms."""
    started_s = time.perf_counter()
    await call()
    return (time.perf_counter() - started_s) * 1e3


async def _on_beat(address: str) -> list[float]:
    """Milliseconds around the engine, of all turns."""
    around_ms: list[float] = []

    async def talk(client: AsyncClient, first_s: float) -> None:
        async with client.session() as session:
            for number in range(NUM_BEATS):
                await asyncio.sleep(first_s + number * BEAT_S - time.perf_counter())
                given = random.Random(number).choices(range(1000, 40_000), k=BEAT_LEN)
                wall_ms, engine_ms = await _turn(session, given, BEAT_LEN)
                around_ms.append(wall_ms - engine_ms)

    async with AsyncClient(address, timeout_s=600) as client:
        first_s = time.perf_counter() + 1
        await asyncio.gather(*(talk(client, first_s + BEAT_S * part / NUM_BEATING) for part in range(NUM_BEATING)))
    return around_ms


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


async def _turn(session: AsyncSession, given: Sequence[int], num_output: int) -> tuple[float, float]:
    """Wall time in ms of a turn through the server, and what the engine says it took of that."""
    started_s = time.perf_counter()
    async for event in session.turn(list(given), max_tokens=num_output, ignore_eos=True):
        if isinstance(event, TurnEnd):
            engine_ms = event.status.timing_ms.total
    return (time.perf_counter() - started_s) * 1e3, engine_ms


def _blocking_turn(session: Session, given: Sequence[int]) -> tuple[float, float]:
    """As `_turn`, with the blocking client."""
    started_s = time.perf_counter()
    for event in session.turn(list(given), max_tokens=NUM_OUTPUT, ignore_eos=True):
        if isinstance(event, TurnEnd):
            engine_ms = event.status.timing_ms.total
    return (time.perf_counter() - started_s) * 1e3, engine_ms
