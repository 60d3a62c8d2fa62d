"""Many parked sessions on a pool for a few: is each one's next turn right, and how long does it wait for its KV?

The engine runs in this process on a thread of its own, without a server. KV in bfloat16; the pool holds twenty
sessions, host memory some more, files the rest. Every session is told a piece of a real text and takes a turn
while its KV is on the device. Later it takes the same turn again from the same place (`rewind_to`). It must compute
nothing that had been stored, and its tokens and their log-likelihoods must be those of the first time, bit for bit.

`restore` is the engine's `timing_ms.restore`: from when a turn is taken up until its KV is back. First all sessions
come in random order, their files out of the page cache at the start; then those in host memory, again and again. What
it may take there is one decode step and the copy at memory speed, both measured here.

Then sessions keep a regular beat, so that they are restored ahead. Each of their turns is followed by that of a session
that stays on the device, half a slot later and by the clock: nobody waits for another's turn.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from load_tests.bench import texts
from load_tests.bench.pictures import draw_parked
from load_tests.bench.results import percentile, print_table, write_result
from microturn.engine.engine import Engine
from microturn.engine.loading import start_engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import MicroturnError
from microturn.sessions.inputs import TokenInput
from microturn.sessions.options import SessionOptions
from microturn.sessions.turn import Status, Turn, TurnOutput, TurnRequest
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings
from microturn.zoo.store import resolve_model

NUM_INPUT, NUM_OUTPUT = 4, 4
NUM_IN_POOL = 20
NUM_STAYING = 4
# A beat is known after so many turns; so many are measured then, of all sessions together.
NUM_LEARNT, NUM_MEASURED = 4, 240


class Answer:
    """A sink whose owner waits for the end."""

    def __init__(self) -> None:
        self.said: list[tuple[int, float]] = []
        self.status: Future[Status] = Future()

    def put(self, output: TurnOutput) -> None:
        self.said += zip(output.token_ids, output.logprobs, strict=True)
        if output.status is not None:
            self.status.set_result(output.status)

    def fail(self, error: MicroturnError) -> None:
        self.status.set_exception(error)


class Crowd:
    """Sessions of equal length that each take one turn, again and again; they are named by number.

    Attributes:
        num_turns: that were taken again.
        num_wrong: those that said something else than the first time, or computed anything that had been stored.
    """

    def __init__(self, engine: Engine, pieces: Sequence[Sequence[int]]) -> None:
        self.engine = engine
        self.num_turns = self.num_wrong = 0
        self._pieces = pieces
        self._expected: list[list[tuple[int, float]]] = []

    def open_next(self) -> None:
        """Opens one more session, which takes its turn for the first time."""
        number = len(self._expected)
        piece = self._pieces[number]
        self._ask(number, piece[:-NUM_INPUT], start=True, max_tokens=0)
        self._expected.append(self._ask(number, piece[-NUM_INPUT:])[1])

    def turn(self, number: int) -> Status:
        """A session takes its turn again."""
        piece = self._pieces[number]
        status, said = self._ask(number, piece[-NUM_INPUT:], rewind_to=len(piece) - NUM_INPUT)
        # The last token of a context is never in the cache; nor is the last one that is said.
        num_new = NUM_INPUT + NUM_OUTPUT
        self.num_turns += 1
        self.num_wrong += said != self._expected[number] or status.usage["computed_tokens"] != num_new
        return status

    def places(self) -> list[str]:
        """Where each session's KV is."""
        return [session["kv"] for session in self.engine.call(Maintenance.describe)]

    def settle(self) -> list[str]:
        """Waits until nothing moves any more; where each session's KV is then."""
        before, now = [""], self.places()
        while now != before:
            time.sleep(1)
            before, now = now, self.places()
        return now

    def _ask(
        self, number: int, given: Sequence[int], *, start: bool = False, **options: object
    ) -> tuple[Status, list[tuple[int, float]]]:
        answer = Answer()
        request = TurnRequest(
            number,
            TokenInput(tuple(given)),
            answer,
            self.engine.clock(),
            start=start,
            options={"max_tokens": NUM_OUTPUT, "ignore_eos": True, "logprobs": True, **options},
            session_options=SessionOptions(),
        )
        self.engine.submit(Turn(request))
        return answer.status.result(), answer.said


def run_parked(model: str, num_sessions: int, context_len: int, host_mb: int, beating: Sequence[int]) -> None:
    """Measures, prints tables, writes a JSON file and draws a picture.

    Args:
        model: a directory, or the name of an embedded model.
        num_sessions: that are parked.
        context_len: tokens of each.
        host_mb: host memory for KV.
        beating: how many sessions keep a beat, each number by itself.
    """
    model_dir = resolve_model(model)
    with _engine(model_dir, num_sessions, context_len, host_mb) as (engine, directory):
        crowd = Crowd(engine, _pieces(model_dir, num_sessions, context_len))
        for _ in tqdm(range(num_sessions), desc="opened", unit="session", mininterval=5):
            crowd.open_next()
        parked = Counter(crowd.settle())
        _drop_from_page_cache(directory)
        again = _all_once(crowd, num_sessions)
        _from_host(crowd, num_sessions, again["host"])
        again["device"] = [crowd.turn(0) for _ in range(100)]
        decode_ms = median(status.timing_ms["decode"] for status in again["device"]) / (NUM_OUTPUT - 1)
        kv = engine.runner.kv
        num_bytes = -(-context_len // kv.page_size) * kv.bytes_per_page
        copy_ms = median(engine.call(lambda _: _copies_ms(num_bytes)))
        slot_s = 3e-3 * median(_totals(again["device"]))
        beats = {number: _on_beat(crowd, number, slot_s) for number in beating}

    print(f"\n{num_sessions} sessions of {context_len} tokens ({num_bytes / 1e6:.1f} MB each), parked: {dict(parked)}")
    _print_turns({place: again[place] for place in ("device", "host", "disk")})
    print(f"a decode step {decode_ms:.1f} ms + the copy {copy_ms:.1f} ms = {decode_ms + copy_ms:.1f} ms")
    for number, (came_back, stayed) in beats.items():
        print(f"\n{number} sessions on a beat of {number * slot_s:.1f} s")
        in_time = sum(status.timing_ms["restore"] == 0 for status in came_back)
        _print_turns({"restored ahead": came_back, "always on the device": stayed})
        print(f"{in_time} of {len(came_back)} were back in time")
    print(f"\nturns taken again: {crowd.num_turns}, wrong or computed again: {crowd.num_wrong}")
    result = {
        "protocol": __doc__,
        "model": model,
        "num_sessions": num_sessions,
        "context_len": context_len,
        "session_bytes": num_bytes,
        "host_mb": host_mb,
        "parked": parked,
        "num_turns": crowd.num_turns,
        "num_wrong": crowd.num_wrong,
        "decode_step_ms": decode_ms,
        "copy_ms": copy_ms,
        "again_ms": {place: _samples(statuses) for place, statuses in again.items()},
        "on_beat_ms": {
            number: {"beat_s": number * slot_s, "restored": _samples(came_back), "stayed": _samples(stayed)}
            for number, (came_back, stayed) in beats.items()
        },
    }
    print("written:", write_result("parked", result))
    restore_ms = {place: [status.timing_ms["restore"] for status in again[place]] for place in ("host", "disk")}
    print("drawn:  ", draw_parked("parked", restore_ms, decode_ms + copy_ms))


@contextmanager
def _engine(model_dir: Path, num_sessions: int, context_len: int, host_mb: int) -> Iterator[tuple[Engine, Path]]:
    """An engine with all tiers, and the directory of its files."""
    # A turn's last tokens, and the part of a page that is left over.
    most_tokens = context_len + 32
    with tempfile.TemporaryDirectory(prefix="microturn-parked-") as directory:
        engine = start_engine(
            Settings(
                model_dir=str(model_dir),
                kv_dtype="bfloat16",
                kv_tokens=NUM_IN_POOL * most_tokens,
                max_context=most_tokens,
                max_sessions=num_sessions,
                idle_timeout_s=MAX_IDLE_TIMEOUT_S,
                host_tier_bytes=host_mb * 10**6,
                disk_tier_dir=directory,
            )
        )
        try:
            yield engine, Path(directory)
        finally:
            engine.stop()


def _pieces(model_dir: Path, num_pieces: int, num_tokens: int) -> list[list[int]]:
    """Pieces of the text; they overlap, and begin at different places."""
    ids = texts.token_ids(model_dir)
    step = (len(ids) - num_tokens) // num_pieces
    return [ids[first : first + num_tokens] for first in range(0, num_pieces * step, step)]


def _drop_from_page_cache(directory: Path) -> None:
    os.sync()
    for path in directory.glob("*/*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _all_once(crowd: Crowd, num_sessions: int) -> dict[str, list[Status]]:
    """Every session's next turn in random order, by where its KV was."""
    statuses: dict[str, list[Status]] = {"device": [], "host": [], "disk": [], "tokens": []}
    order = random.Random(0).sample(range(num_sessions), num_sessions)
    for number in tqdm(order, desc="in any order", unit="turn", mininterval=5):
        place = crowd.places()[number]
        statuses[place].append(crowd.turn(number))
    return statuses


def _from_host(crowd: Crowd, num_turns: int, statuses: list[Status]) -> None:
    """So many turns of sessions that are in host memory when it is their turn."""
    choose = random.Random(1)
    for _ in tqdm(range(num_turns), desc="from host memory", unit="turn", mininterval=5):
        in_host = [number for number, place in enumerate(crowd.places()) if place == "host"]
        statuses.append(crowd.turn(choose.choice(in_host)))


def _copies_ms(num_bytes: int) -> list[float]:
    """Milliseconds of copying so many bytes in memory, from and to places that no core has touched of late."""
    places = list(torch.zeros(24, num_bytes, dtype=torch.uint8))
    copies_ms = []
    for source, target in zip(places * 3, places[1:] + places * 2, strict=False):
        started_s = time.perf_counter()
        target.copy_(source)
        copies_ms.append((time.perf_counter() - started_s) * 1e3)
    return copies_ms


def _on_beat(crowd: Crowd, num_beating: int, slot_s: float) -> tuple[list[Status], list[Status]]:
    """Turns by the clock, once all beats are known: of sessions that go and come back, and of those that stay."""
    staying = cycle(range(num_beating, num_beating + NUM_STAYING))
    num_slots = NUM_LEARNT * num_beating + NUM_MEASURED
    came_back: list[Status] = []
    stayed: list[Status] = []
    began_s = time.monotonic()
    for slot in tqdm(range(num_slots), desc=f"{num_beating} on a beat", unit="slot", mininterval=5):
        for statuses, number, at in ((came_back, slot % num_beating, slot), (stayed, next(staying), slot + 0.5)):
            time.sleep(max(0.0, began_s + at * slot_s - time.monotonic()))
            statuses.append(crowd.turn(number))
    return came_back[-NUM_MEASURED:], stayed[-NUM_MEASURED:]


def _totals(statuses: Sequence[Status]) -> list[float]:
    return [status.timing_ms["total"] for status in statuses]


def _samples(statuses: Sequence[Status]) -> dict[str, list[float]]:
    return {part: [round(status.timing_ms[part], 2) for status in statuses] for part in ("restore", "total")}


def _print_turns(turns: Mapping[str, Sequence[Status]]) -> None:
    rows = []
    for name, statuses in turns.items():
        samples = _samples(statuses)
        figures = [percentile(samples[part], percent) for part in ("restore", "total") for percent in (50, 99)]
        rows.append([name, len(statuses), *figures])
    print_table(["KV was", "turns", "restore p50, ms", "p99", "whole turn p50, ms", "p99"], rows)
