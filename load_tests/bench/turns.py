"""The turn protocol: S sessions in parallel, closed loop, 16 new tokens in and exactly 8 out per turn.

Three ways to serve it, through the same server and client:

* `session`: one streaming session each; a turn sends its 16 tokens.
* `stateless`: every turn is a request of its own, with the whole conversation so far, computed anew.
* `prefix`: the same requests, but the server finds the KV of the pages that it has seen before, as servers without
  sessions do. It is warm as long as nobody else needs the pages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from tqdm import tqdm

from load_tests.bench.pictures import draw_turns
from load_tests.bench.results import percentile, print_table, write_result
from load_tests.bench.server import running_server
from microturn_client import Client, Session, TurnEnd

NUM_INPUT, NUM_OUTPUT = 16, 8
Progress: TypeAlias = "tqdm[NoReturn]"
MODES = ("session", "prefix", "stateless")


@dataclass
class Conversation:
    """One session's side of the protocol.

    Attributes:
        latencies_ms: wall time at the client of each measured turn, by turn number.
    """

    seed: int
    history: list[int] = field(default_factory=list)
    latencies_ms: dict[int, float] = field(default_factory=dict)

    def next_input(self, turn: int) -> list[int]:
        """The turn's tokens; the same in every mode."""
        return random.Random(self.seed * 100_003 + turn).choices(range(1000, 40_000), k=NUM_INPUT)


def run_turns(model: str, num_sessions: int, num_turns: int, num_runs: int, stateless_every: int) -> None:
    """Measures all modes side by side, run by run; writes a JSON file, a picture and a table.

    Args:
        model: a directory, or the name of an embedded model.
        num_sessions: sessions in parallel.
        num_turns: turns of each.
        num_runs: how often everything is measured.
        stateless_every: of the stateless turns only each so many-th is measured, since they cost seconds and do not
            depend on each other.
    """
    runs: dict[str, list[dict[int, float]]] = {mode: [] for mode in MODES}
    for run in range(num_runs):
        for mode in MODES:
            share = "true" if mode == "prefix" else "false"
            measured = [t for t in range(1, num_turns + 1) if mode != "stateless" or t % stateless_every == 0 or t == 1]
            with running_server(model, f"share_prefixes={share}") as address:
                label = f"run {run + 1}/{num_runs} {mode:9}"
                runs[mode].append(_measure(address, mode, num_sessions, num_turns, measured, label))
    last = num_turns - num_turns % stateless_every
    rows = [_summary(mode, runs[mode], last) for mode in MODES]
    print(f"\n{num_sessions} sessions, {NUM_INPUT} tokens in, {NUM_OUTPUT} out; ms a turn, median of {num_runs} runs")
    print_table(
        ["mode", "turns 2 to 11", f"turn {last}", "session is faster"],
        [[mode, first, late, f"{late / rows[0][2]:.1f} x"] for mode, first, late in rows],
    )
    name = f"turns-{num_sessions}x{num_turns}"
    result = {"protocol": __doc__, "model": model, "num_sessions": num_sessions, "ms": runs}
    print("written:", write_result(name, result))
    print("drawn:  ", draw_turns(name, runs, num_sessions))


def _summary(mode: str, runs: Sequence[dict[int, float]], last: int) -> tuple[str, float, float]:
    """Mode, median of the first turns, median of the last measured ones."""
    first = percentile([ms for run in runs for turn, ms in run.items() if 2 <= turn <= 11], 50)
    return mode, first, percentile([run[last] for run in runs], 50)


def _measure(
    address: str, mode: str, num_sessions: int, num_turns: int, measured: Sequence[int], label: str
) -> dict[int, float]:
    """One run of one mode: the mean over the sessions of each measured turn."""
    conversations = [Conversation(seed) for seed in range(num_sessions)]
    progress: Progress = tqdm(total=num_sessions * num_turns, desc=label, unit="turn", leave=False)

    def one(conversation: Conversation) -> None:
        with Client(address, timeout_s=600) as client:
            if mode == "session":
                with client.session() as session:
                    _converse(conversation, num_turns, lambda given: _timed_turn(session, given), progress)
            else:
                _repeat(conversation, client, num_turns, set(measured), progress)

    with ThreadPoolExecutor(num_sessions) as pool:
        list(pool.map(one, conversations))
    progress.close()
    return {turn: sum(c.latencies_ms[turn] for c in conversations) / num_sessions for turn in measured}


def _converse(
    conversation: Conversation, num_turns: int, turn: Callable[[list[int]], tuple[list[int], float]], progress: Progress
) -> None:
    for number in range(1, num_turns + 1):
        given = conversation.next_input(number)
        generated, conversation.latencies_ms[number] = turn(given)
        conversation.history += given + generated
        progress.update()


def _repeat(conversation: Conversation, client: Client, num_turns: int, measured: set[int], progress: Progress) -> None:
    """Turns as requests of their own; what is not measured is not sent, and random tokens stand for its answer."""
    for number in range(1, num_turns + 1):
        conversation.history += conversation.next_input(number)
        if number in measured:
            with client.session() as request:
                generated, conversation.latencies_ms[number] = _timed_turn(request, conversation.history)
        else:
            generated = conversation.next_input(-number)[:NUM_OUTPUT]
        conversation.history += generated
        progress.update()


def _timed_turn(session: Session, given: Sequence[int]) -> tuple[list[int], float]:
    started_s = time.perf_counter()
    generated: list[int] = []
    for event in session.turn(list(given), max_tokens=NUM_OUTPUT, ignore_eos=True):
        if not isinstance(event, TurnEnd):
            generated += event.ids
    return generated, (time.perf_counter() - started_s) * 1e3
