"""One session of many turns, far beyond the positions of its model: does it stay as fast, as small and as good?

The engine runs in this process, without a server. Each turn brings four tokens of a real text and generates four more;
the session's window slides all the time. The text is the reference of the Python language that the interpreter carries
for `help()`, again and again.

Quality is the perplexity of the text that came in, teacher-forced: every input token but the first of a turn is
predicted from all that the session sees. The last turns of the long session are held against a fresh session with the
same window, which is told the same turns and those before them that fill its window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from statistics import median

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from load_tests.bench import texts
from load_tests.bench.pictures import draw_endless
from load_tests.bench.results import percentile, print_table, write_result
from microturn.batch import Batch
from microturn.engine import Engine
from microturn.errors import MicroturnError
from microturn.loading import load_engine
from microturn.model_store import resolve_model
from microturn.options import SessionOptions
from microturn.runner import Runner
from microturn.settings import Settings
from microturn.turn import TokenInput, Turn, TurnOutput, TurnRequest

NUM_INPUT, NUM_OUTPUT = 4, 4
# Turns whose median is compared: the second thousand, when the window has filled, and the last.
SPAN = 1000


class ScoringRunner:
    """Runs every token as a row of its own, and keeps how much each surprised the model.

    Attributes:
        surprises: negative log-likelihoods of the tokens that came behind others in a row.
    """

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
            replace(row, token_ids=[token_id], position=row.position + at, wants_logits=True)
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

    def turn(self, given: Sequence[int]) -> float:
        """Its milliseconds."""
        ending = _Ending()
        started_s = time.perf_counter()
        session_options = SessionOptions()
        if not self._has_begun:
            session_options = SessionOptions(overflow="window", window_tokens=self._window_tokens)
        request = TurnRequest(
            self._session_id,
            TokenInput(tuple(given)),
            ending,
            self._engine.clock(),
            start=not self._has_begun,
            options={"max_tokens": NUM_OUTPUT, "ignore_eos": True},
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


def run_endless(model: str, num_turns: int, window_tokens: int) -> None:
    """Measures, prints a table, writes a JSON file and draws a picture.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: of the long session, three times `SPAN` or more.
        window_tokens: of both sessions.
    """
    model_dir = resolve_model(model)
    engine = load_engine(Settings(model_dir=str(model_dir), kv_tokens=8192))
    scores = engine.runner = ScoringRunner(engine.runner)
    inputs = _inputs(texts.token_ids(model_dir), num_turns)
    long = Talk(engine, 1, window_tokens)
    process = psutil.Process()
    turn_ms, memory_mb = [], []
    for given in tqdm(inputs, desc="turns", unit="turn", mininterval=5):
        turn_ms.append(long.turn(given))
        if len(turn_ms) % 100 == 0:
            memory_mb.append(process.memory_info().rss / 1e6)
    late = scores.surprises[-SPAN * (NUM_INPUT - 1) :]

    fresh = Talk(engine, 2, window_tokens)
    num_lead_in = window_tokens // (NUM_INPUT + NUM_OUTPUT) + 1
    lead_in, again = inputs[-SPAN - num_lead_in : -SPAN], inputs[-SPAN:]
    fresh_ms = [fresh.turn(given) for given in tqdm([*lead_in, *again], desc="fresh", unit="turn", mininterval=5)]
    early = scores.surprises[-SPAN * (NUM_INPUT - 1) :]

    second, last, beside = turn_ms[SPAN : 2 * SPAN], turn_ms[-SPAN:], fresh_ms[-SPAN:]
    perplexity = {"late": math.exp(_mean(late)), "fresh": math.exp(_mean(early))}
    print(f"\none session of {num_turns} turns, {num_turns * (NUM_INPUT + NUM_OUTPUT)} tokens, window {window_tokens}")
    print_table(
        ["", "second thousand turns", "last thousand turns", "the same turns in a fresh session"],
        [
            ["p50, ms", *(median(span) for span in (second, last, beside))],
            ["p99, ms", *(percentile(span, 99) for span in (second, last, beside))],
            ["memory, MB", memory_mb[2 * SPAN // 100 - 1], memory_mb[-1], ""],
            ["perplexity of the input", "", perplexity["late"], perplexity["fresh"]],
        ],
    )
    result = {
        "protocol": __doc__,
        "model": model,
        "num_turns": num_turns,
        "window_tokens": window_tokens,
        "p50_ms": {"second": median(second), "last": median(last), "fresh": median(beside)},
        "perplexity": perplexity,
        "memory_mb": memory_mb,
        "turn_ms": [round(ms, 2) for ms in turn_ms],
    }
    print("written:", write_result("endless", result))
    print("drawn:  ", draw_endless("endless", turn_ms, memory_mb))


def _inputs(ids: list[int], num_turns: int) -> list[list[int]]:
    endless = cycle(ids)
    return [list(islice(endless, NUM_INPUT)) for _ in range(num_turns)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
