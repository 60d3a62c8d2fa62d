"""Oracle 6: a session whose window slides equals a plain reference on a transformers cache, however it is split."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.kv.window import Window
from microturn.model.runner import ModelRunner
from support import models
from support.driver import model_runner
from support.models import VOCAB_SIZE
from support.oracle import RecordingDriver, check_sampled, tolerance_of
from support.paths import PATHS
from support.plain_window import windowed_logits

PAGE_SIZE = 16


def check_window(
    model: PreTrainedModel,
    vocabulary: Sequence[int],
    window: Window,
    *,
    seed: int,
    num_sessions: int,
    num_turns: int,
    num_pages: int = 256,
    max_batch_tokens: int = 48,
    new_runner: Callable[..., ModelRunner] = model_runner,
) -> int:
    """Random sessions at once, in turns of 0 to 40 tokens with 0 to 6 generated; some turns are taken back in part.

    Returns:
        How many tokens were computed.

    Raises:
        AssertionError: when a logit differs or a greedy token is another one.
    """
    rng = random.Random(seed)
    driver = RecordingDriver(
        new_runner(model, num_pages=num_pages, page_size=PAGE_SIZE),
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_context=window.max_kept + 60,
        max_batch_tokens=max_batch_tokens,
        window_slack=window.slack,
    )
    start: dict[str, Any] = {
        "start": True,
        "overflow": "window",
        "sink_tokens": window.num_sinks,
        "window_tokens": window.length,
    }
    histories: list[list[int]] = [[] for _ in range(num_sessions)]
    generated: list[dict[int, Any]] = [{} for _ in range(num_sessions)]
    num_computed = 0
    for number in range(num_turns):
        recorders = {}
        for session in rng.sample(range(num_sessions), num_sessions):
            history = histories[session]
            asked: dict[str, Any] = start if number == 0 else {}
            if number and rng.random() < 0.3:
                left = len(history) - rng.randint(0, min(window.slack, len(history)))
                asked = {"rewind_to": left}
                del history[left:]
                generated[session] = {at: row for at, row in generated[session].items() if at < left}
            given = rng.choices(vocabulary, k=rng.randint(0 if history else 1, 40))
            history += given
            max_tokens = rng.choice([0, 1, 6])
            recorders[session], _ = driver.post(session, given, max_tokens=max_tokens, ignore_eos=True, **asked)
            driver.steps(rng.randint(0, 2))
        driver.run()
        for session, recorder in recorders.items():
            history, status = histories[session], recorder.status
            num_computed += status.usage["computed_tokens"]
            for token_id in recorder.token_ids:
                generated[session][len(history)] = driver.logits[session, len(history)]
                history.append(token_id)
            assert status.context_len == len(history)
            assert status.kept_len == len(history) - window.evicted(len(history))
    for history, rows in zip(histories, generated, strict=True):
        assert window.evicted(len(history) - 1) >= 2 * window.slack, "the window slid too little"
        check_sampled(windowed_logits(model, history, window), history, rows, tolerance_of(model))
    assert sum(map(len, generated)) >= num_sessions * num_turns, "the run compared too little"
    return num_computed


@PATHS
@pytest.mark.parametrize(
    "window",
    [Window(16, 38, 16), Window(16, 64, 32), Window(0, 40, 16), Window(16, 5, 16)],
    ids=["small", "wide", "without sinks", "tiny"],
)
def test_any_split_equals_the_plain_reference(
    attending_model: PreTrainedModel, window: Window, new_runner: Callable[..., ModelRunner]
) -> None:
    check_window(
        attending_model, range(VOCAB_SIZE), window, seed=1, num_sessions=3, num_turns=12, new_runner=new_runner
    )


@pytest.mark.parametrize("window", [Window(16, 40, 16), Window(16, 5, 16)], ids=["longer", "shorter"])
def test_where_all_layers_have_a_window_the_shorter_one_counts(window: Window) -> None:
    check_window(models.only_sliding(), range(VOCAB_SIZE), window, seed=1, num_sessions=3, num_turns=12)


@pytest.mark.parametrize("max_batch_tokens", [1, 7, pytest.param(500, marks=pytest.mark.all_processors)])
def test_chunking_changes_nothing(attending_model: PreTrainedModel, max_batch_tokens: int) -> None:
    check_window(
        attending_model,
        range(VOCAB_SIZE),
        Window(16, 40, 16),
        seed=2,
        num_sessions=2,
        num_turns=10,
        max_batch_tokens=max_batch_tokens,
    )


def test_what_is_preempted_is_computed_again_as_it_was(attending_model: PreTrainedModel) -> None:
    """Five sessions that keep some 90 tokens each, on a pool for two: their whole history is walked through again."""
    window = Window(16, 40, 16)
    arguments: dict[str, Any] = {"seed": 3, "num_sessions": 5, "num_turns": 9}
    roomy = check_window(attending_model, range(VOCAB_SIZE), window, **arguments)
    tight = check_window(attending_model, range(VOCAB_SIZE), window, num_pages=13, **arguments)
    assert tight > 2 * roomy, "nothing was preempted"


@pytest.mark.all_processors
def test_real_weights_equal_the_plain_reference(real_model: PreTrainedModel) -> None:
    check_window(real_model, range(17, 49152), Window(16, 80, 32), seed=4, num_sessions=3, num_turns=16)
