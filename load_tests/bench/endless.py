"""One session of many turns, far beyond the positions of its model: does it stay as fast, as small and as good?

The engine runs in this process, without a server. Each turn brings four tokens of a real text and generates four more;
the session's window slides all the time. The text is the reference of the Python language that the interpreter carries
for `help()`, again and again.

Quality is the perplexity of the text that comes in, teacher-forced: every input token is predicted from all that the
session sees. It is taken in two thousand turns behind those that are timed, and held against that of fresh sessions
with the same window, one for each thousand, which are told the same turns and those before them that fill a window.
What a session says itself is sampled: greedily it falls into loops, which one session has and another has not. Sampled
sessions of the same text and length are 3 to 4 % apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from load_tests.bench import texts
from load_tests.bench.pictures import draw_endless
from load_tests.bench.results import percentile, print_table, write_result
from microturn.engine.engine import Engine
from microturn.engine.loading import load_engine
from microturn.errors import MicroturnError
from microturn.model.batch import Batch
from microturn.model.runner import Runner
from microturn.sessions.inputs import TokenInput, TurnInput
from microturn.sessions.options import SessionOptions
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest
from microturn.settings import Settings
from microturn.zoo.store import resolve_model

NUM_INPUT, NUM_OUTPUT = 4, 4
# Turns whose median is compared: the second thousand, when the window has filled, and the last.
SPAN = 1000
NUM_SCORED = 2 * SPAN


class ScoringRunner:
    """Runs every token as a row of its own, and keeps how much each surprised the model.

    Attributes:
        surprises: negative log-likelihoods of the tokens that came behind others in a row.
    """

    is_asynchronous = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.vocab_size = runner.vocab_size
        self.hidden_size = runner.hidden_size
        self.accepts_embeds = runner.accepts_embeds
        self.no_window_reason = runner.no_window_reason
        self.kv = runner.kv
        self.surprises: list[float] = []

    def run(self, batch: Batch) -> Tensor:
        """See `Runner.run`."""
        rows = [
            row._replace(token_ids=[token_id], position=row.position + at, wants_logits=True)
            for row in batch.rows
            for at, token_id in enumerate(row.token_ids)
        ]
        logits = self._runner.run(Batch(rows))
        wanted, first = [], 0
        for row in batch.rows:
            following = torch.tensor(list(row.token_ids[1:]), dtype=torch.int64)
            last = first + len(following)
            likelihoods = logits[first:last].log_softmax(-1).gather(1, following[:, None])
            self.surprises += (-likelihoods[:, 0]).tolist()
            if row.wants_logits:
                wanted.append(last)
            first = last + 1
        return logits[wanted]


class Talk:
    """A session in this process, turn by turn."""

    def __init__(self, engine: Engine, session_id: int, window_tokens: int) -> None:
        self._engine = engine
        self._session_id = session_id
        self._window_tokens = window_tokens
        self._has_begun = False

    def turn(self, given: TurnInput, num_output: int) -> float:
        """Its milliseconds."""
        ending = _Ending()
        started_s = time.perf_counter()
        session_options = SessionOptions()
        if not self._has_begun:
            session_options = SessionOptions(overflow="window", window_tokens=self._window_tokens)
        request = TurnRequest(
            self._session_id,
            given,
            ending,
            self._engine.clock(),
            start=not self._has_begun,
            options={"max_tokens": num_output, "ignore_eos": True, "temperature": 1.0, "seed": self._session_id},
            session_options=session_options,
        )
        self._engine.submit(Turn(request))
        while self._engine.step():
            pass
        if ending.error is not None:
            raise ending.error
        self._has_begun = True
        return (time.perf_counter() - started_s) * 1e3


class _Ending:
    """A sink that keeps an error."""

    error: MicroturnError | None = None

    def put(self, output: TurnOutput) -> None:
        pass

    def fail(self, error: MicroturnError) -> None:
        self.error = error


def run_endless(model: str, num_turns: int, window_tokens: int, weights: str) -> None:
    """Measures, prints a table, writes a JSON file and draws a picture.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: that are timed, twice `SPAN` or more.
        window_tokens: of all sessions.
        weights: see `Settings`.
    """
    model_dir = resolve_model(model)
    engine = load_engine(Settings(model_dir=str(model_dir), kv_tokens=8192, weights=weights, idle_timeout_s=3600))
    inputs = _inputs(texts.token_ids(model_dir), num_turns + NUM_SCORED)
    timed = inputs[:num_turns]
    long = Talk(engine, 1, window_tokens)
    process = psutil.Process()
    turn_ms, memory_mb = [], []
    for given in tqdm(timed, desc="turns", unit="turn", mininterval=5):
        turn_ms.append(long.turn(TokenInput(given), NUM_OUTPUT))
        if len(turn_ms) % 100 == 0:
            memory_mb.append(process.memory_info().rss / 1e6)

    surprises: dict[str, list[float]] = {"late": [], "fresh": []}
    for first in range(num_turns, num_turns + NUM_SCORED, SPAN):
        scored = inputs[first : first + SPAN]
        surprises["late"] += _surprises(engine, long, scored, "late")
        fresh = Talk(engine, first, window_tokens)
        for given in inputs[first - window_tokens // (NUM_INPUT + NUM_OUTPUT) - 1 : first]:
            fresh.turn(TokenInput(given), NUM_OUTPUT)
        surprises["fresh"] += _surprises(engine, fresh, scored, "fresh")
    perplexity = {name: math.exp(sum(of) / len(of)) for name, of in surprises.items()}

    second, last = turn_ms[SPAN : 2 * SPAN], turn_ms[-SPAN:]
    print(f"\none session of {num_turns} turns, {num_turns * (NUM_INPUT + NUM_OUTPUT)} tokens, window {window_tokens}")
    print_table(
        ["", "second thousand turns", "last thousand turns"],
        [
            ["p50, ms", median(second), median(last)],
            ["p99, ms", percentile(second, 99), percentile(last, 99)],
            ["memory, MB", memory_mb[2 * SPAN // 100 - 1], memory_mb[-1]],
        ],
    )
    print_table(
        ["", "fresh sessions", "behind the last turn"], [["perplexity", perplexity["fresh"], perplexity["late"]]]
    )
    result = {
        "protocol": __doc__,
        "model": model,
        "num_turns": num_turns,
        "window_tokens": window_tokens,
        "weights": weights,
        "p50_ms": {"second": median(second), "last": median(last)},
        "perplexity": perplexity,
        "memory_mb": memory_mb,
        "turn_ms": [round(ms, 2) for ms in turn_ms],
    }
    print("written:", write_result("endless", result))
    print("drawn:  ", draw_endless("endless", turn_ms, memory_mb, NUM_INPUT + NUM_OUTPUT))


def _surprises(engine: Engine, talk: Talk, inputs: Sequence[Sequence[int]], name: str) -> list[float]:
    """Negative log-likelihoods of the input of turns to come."""
    plain, scores = engine.runner, ScoringRunner(engine.runner)
    engine.steps.runner = scores
    for given in tqdm(inputs, desc=name, unit="turn", mininterval=5):
        talk.turn(TokenInput(given), NUM_OUTPUT)
    engine.steps.runner = plain
    return scores.surprises


def _inputs(ids: list[int], num_turns: int) -> list[list[int]]:
    endless = cycle(ids)
    return [list(islice(endless, NUM_INPUT)) for _ in range(num_turns)]
