"""What "correct" means, as functions: sessions through the engine against one forward pass of the stock model.

Oracle 1, *incremental = full*: any split of a sequence into turns gives the logits of the whole. Oracle 2, *company*:
who else is in the batch, chunking and preemption change no token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.engine.in_flight_step import InFlightStep
from microturn.engine.scheduled_row import ScheduledRow
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.kv.window import Window
from microturn.model import recurrent
from microturn.model.batch import Batch, Row
from microturn.model.paged_attention import PagedAttention, attending
from microturn.model.runner import ModelRunner
from microturn.model.stock import untouched
from microturn.model.tracing import trace_layers
from microturn.sessions.turn import SessionId
from support.driver import Driver, model_runner
from support.plain_window import windowed_logits
from support.rounded import exact_of

TOLERANCE = 1e-3
# Where products round their inputs to 8 bits, a float's last bit may decide between two integers, which changes those
# behind it: 0.1 was seen, of logits whose spread is 2. Products themselves are compared to the bit in unit tests.
_INT8_TOLERANCE = 0.25
# A recurrent state sums up all tokens before, in pieces in another order than one by one: 1.2e-3 was seen.
_RECURRENT_TOLERANCE = 5e-3


def tolerance_of(model: PreTrainedModel) -> float:
    """How far a logit may be from the model's own."""
    if recurrent.installed(model) is not None:
        return _RECURRENT_TOLERANCE
    return TOLERANCE if exact_of(model) is None else _INT8_TOLERANCE


class RecordingDriver(Driver):
    """An engine that keeps the logits that each token was sampled from, by session and position of the token."""

    def __init__(self, runner: ModelRunner, **kwargs: Any) -> None:
        super().__init__(runner, **kwargs)
        self.logits: dict[tuple[SessionId, int], Tensor] = {}
        self._runs, self._launches = runner.run, self.engine.steps.launch
        self._rows: Sequence[ScheduledRow] = []
        runner.run = self._run  # type: ignore[method-assign]
        self.engine.steps.launch = self._launch  # type: ignore[method-assign]

    def _launch(self, rows: Sequence[ScheduledRow], before: InFlightStep | None = None) -> InFlightStep:
        self._rows = rows
        return self._launches(rows, before)

    def _run(self, batch: Batch) -> Tensor:
        logits = self._runs(batch)
        # Those behind a draft's tokens too: where it is refused, the next pass writes over what follows.
        wanting = [
            (scheduled.session.id, scheduled.end + place)
            for scheduled, row in zip(self._rows, batch.rows, strict=True)
            for place in range(row.num_logits)
        ]
        for place, row_logits in zip(wanting, logits, strict=True):
            self.logits[place] = row_logits.clone()
        return logits


def check_incremental(
    model: PreTrainedModel,
    vocabulary: Sequence[int],
    *,
    seed: int,
    num_sessions: int,
    num_turns: int = 4,
    max_batch_tokens: int = 48,
    kv_dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    new_runner: Callable[..., ModelRunner] = model_runner,
    **options: Any,
) -> list[list[int]]:
    """Random sessions at once, each in turns of 0 to 64 tokens with 0 to 6 generated, against one forward pass.

    In float32 that is the stock model's, in other types our own, which rounds alike.

    Args:
        new_runner: makes the runner over the model.
        options: of all turns.

    Returns:
        The contexts of the sessions at the end.

    Raises:
        AssertionError: when a logit differs by more than the tolerance, which is the model's unless told, or a greedy
            token is another one.
    """
    rng = random.Random(seed)
    runner = new_runner(model, num_pages=1024, page_size=16, kv_dtype=kv_dtype)
    driver = RecordingDriver(runner, num_pages=1024, page_size=16, max_batch_tokens=max_batch_tokens)
    histories: list[list[int]] = [[] for _ in range(num_sessions)]
    generated: list[list[int]] = [[] for _ in range(num_sessions)]
    for number in range(num_turns):
        recorders = {}
        for session in rng.sample(range(num_sessions), num_sessions):
            given = rng.choices(vocabulary, k=rng.randint(0 if histories[session] else 1, 64))
            histories[session] += given
            recorders[session], _ = driver.post(
                session + 1, given, start=number == 0, max_tokens=rng.choice([0, 1, 6]), ignore_eos=True, **options
            )
            for _ in range(rng.randint(0, 2)):  # so that turns of different sessions overlap in every way
                driver.engine.step()
        driver.run()
        for session, recorder in recorders.items():
            assert recorder.status.context_len == len(histories[session]) + len(recorder.token_ids)
            for token_id in recorder.token_ids:
                generated[session].append(len(histories[session]))
                histories[session].append(token_id)

    num_compared = 0
    for session, history in enumerate(histories):
        if kv_dtype == torch.float32:
            expected = stock_logits(model, history)
        else:
            expected = one_shot_logits(model, history, kv_dtype, layout=runner.kv.layout)
        sampled_from = {at: driver.logits[session + 1, at] for at in generated[session]}
        check_sampled(expected, history, sampled_from, tolerance or tolerance_of(model))
        num_compared += len(generated[session])
    assert num_compared >= num_sessions, "the run compared too little"
    return histories


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits [n, vocab_size] of one full forward pass of the model with nothing of ours in it."""
    with untouched(model):
        logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def one_shot_logits(
    model: PreTrainedModel, ids: Sequence[int], kv_dtype: torch.dtype, *, layout: PageLayout = PageLayout.HND
) -> Tensor:
    """Logits [n, vocab_size] of one full forward pass of transformers' layers over our attention, with nobody else."""
    pages = list(range(-(-len(ids) // 16)))
    kv = KVTensors(trace_layers(model), len(pages), 16, kv_dtype, model.device, layout=layout)
    attention = PagedAttention(Batch([Row(list(ids), 0, pages)]), kv)
    at = torch.arange(len(ids), device=model.device)[None]
    given = torch.tensor([list(ids)], device=model.device)
    with attending(attention):
        logits: Tensor = model(input_ids=given, position_ids=at, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def stock_greedy(model: PreTrainedModel, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens of a plain transformers `generate` that no end token stops."""
    end_ids, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        with untouched(model):
            output = model.generate(
                torch.tensor([list(ids)], device=model.device), max_new_tokens=num_tokens, do_sample=False
            )
    finally:
        model.generation_config.eos_token_id = end_ids
    return output[0, len(ids) :].tolist()


def check_sampled(
    expected: Tensor, context: Sequence[int], got: Mapping[int, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Checks what tokens of a context were sampled from, greedily.

    Args:
        expected: logits [len(context), vocab_size] of a reference.
        context: token ids.
        got: logits [vocab_size] by the position of the token.
        tolerance: how far a logit may be off.

    Raises:
        AssertionError: one is further off, or another token was likelier by more than that.
    """
    for position, logits in got.items():
        row = expected[position - 1]
        assert (logits - row).abs().max() <= tolerance, f"the logits of token {position}"
        assert row.max() - row[context[position]] <= tolerance, f"token {position} of {context}"


def check_greedy(
    model: PreTrainedModel, context: Sequence[int], positions: Sequence[int], window: Window | None = None
) -> None:
    """Checks tokens of a context against a plain reference over all of it.

    Args:
        model: the stock model.
        context: token ids.
        positions: of those that were generated greedily, none of them the first.
        window: of the session.

    Raises:
        AssertionError: another token was likelier there, by more than the tolerance of the model.
    """
    logits = stock_logits(model, context) if window is None else windowed_logits(model, context, window)
    for position in positions:
        row = logits[position - 1]
        assert row.max() - row[context[position]] <= tolerance_of(model), f"token {position} of {context}"
