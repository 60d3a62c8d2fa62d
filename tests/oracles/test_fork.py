"""Oracle 5: after a fork both sessions equal two that never knew of each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.window import Window
from support.driver import Recorder, model_runner
from support.models import VOCAB_SIZE
from support.oracle import RecordingDriver, check_sampled, stock_logits, tolerance_of
from support.plain_window import windowed_logits

WINDOW = Window(16, 40, 16)
PLAIN: dict[str, Any] = {}
WINDOWED: dict[str, Any] = {"overflow": "window", "sink_tokens": WINDOW.num_sinks, "window_tokens": WINDOW.length}


def check_forks(
    model: PreTrainedModel, vocabulary: Sequence[int], *, seed: int, start: dict[str, Any], num_rounds: int
) -> None:
    """A family of sessions: each round all take a turn, and one of them, parked or running, is forked.

    Raises:
        AssertionError: when a logit differs from that of a plain reference over the session's
            own history, or a greedy token is another one.
    """
    rng = random.Random(seed)
    driver = RecordingDriver(
        model_runner(model, num_pages=400, page_size=16),
        num_pages=400,
        page_size=16,
        max_context=WINDOW.max_kept + 100 if start else 1000,
        max_batch_tokens=24,
        window_slack=WINDOW.slack,
    )
    histories: dict[str, list[int]] = {}
    generated: dict[str, dict[int, Tensor]] = {}

    def post(session_id: str, history: list[int], **values: Any) -> Recorder:
        given = rng.choices(vocabulary, k=rng.randint(1, 30))
        histories[session_id] = history + given
        generated.setdefault(session_id, {})
        return driver.post(session_id, given, max_tokens=rng.choice([0, 3, 6]), ignore_eos=True, **values)[0]

    answers = {"0": post("0", [], start=True, **start)}
    for number in range(1, num_rounds):
        driver.run()
        for session_id, answer in answers.items():
            for token_id in answer.token_ids:
                history = histories[session_id]
                generated[session_id][len(history)] = driver.logits[session_id, len(history)]
                history.append(token_id)
            assert answer.status.context_len == len(histories[session_id])
        parent = rng.choice(list(histories))
        committed = list(histories[parent])
        answers = {session_id: post(session_id, history) for session_id, history in list(histories.items())}
        driver.steps(rng.randint(0, 3))  # so that the parent is parked, or in the middle of its turn
        if answers[parent].is_done:
            committed = [*histories[parent], *answers[parent].token_ids]
        left = len(committed) - rng.choice([0, 0, 1, 9])
        answers[str(number)] = post(
            str(number), committed[: max(1, left)], start=True, fork_of=parent, rewind_to=max(1, left)
        )
    driver.run()

    reference: Callable[[Sequence[int]], Tensor] = partial(stock_logits, model)
    if start:
        reference = partial(windowed_logits, model, window=WINDOW)
    for session_id, history in histories.items():
        if not generated[session_id]:
            continue
        check_sampled(reference(history), history, generated[session_id], tolerance_of(model))
    assert sum(map(len, generated.values())) > 4 * num_rounds, "the run compared too little"


@pytest.mark.parametrize("seed", [0, 1])
def test_both_branches_go_on_as_if_alone(tiny_model: PreTrainedModel, seed: int) -> None:
    check_forks(tiny_model, range(VOCAB_SIZE), seed=seed, start=PLAIN, num_rounds=6)


@pytest.mark.parametrize("seed", [0, 1])
def test_both_branches_of_a_window_go_on_as_if_alone(attending_model: PreTrainedModel, seed: int) -> None:
    check_forks(attending_model, range(VOCAB_SIZE), seed=seed, start=WINDOWED, num_rounds=6)


def test_branches_with_real_weights_go_on_as_if_alone(real_model: PreTrainedModel) -> None:
    check_forks(real_model, range(17, 49152), seed=5, start=PLAIN, num_rounds=5)
