"""Oracle 6 where inputs are forgotten: KV that was lost is that of a session that was told sinks and window alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.kv.window import Window
from microturn.model.runner import ModelRunner
from support import models
from support.driver import model_runner
from support.models import VOCAB_SIZE
from support.oracle import TOLERANCE, RecordingDriver, check_sampled
from support.paths import PATHS
from support.plain_window import windowed_logits
from support.snapshots import find

PAGE_SIZE = 16
NUM_PAGES = 14
MAX_CONTEXT = 200


def check_rebuilt(
    model: PreTrainedModel,
    window: Window,
    *,
    max_batch_tokens: int = 48,
    new_runner: Callable[..., ModelRunner] = model_runner,
) -> None:
    """A session slides, gives way to another in a pool for one, and goes on; twice.

    Raises:
        AssertionError: when a logit differs from the reference's, or a status does not say what happened.
    """
    rng = random.Random(5)
    driver = RecordingDriver(
        new_runner(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE),
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_context=MAX_CONTEXT,
        max_batch_tokens=max_batch_tokens,
        window_slack=window.slack,
        history_bytes=0,
    )
    start: dict[str, Any] = {
        "start": True,
        "overflow": "window",
        "sink_tokens": window.num_sinks,
        "window_tokens": window.length,
    }
    history: list[int] = []
    # What the KV has been computed from: all, or with a gap.
    told: list[int] = []
    for part in range(3):
        gap, generated = len(history) - len(told), {}
        for turn in range(8):
            given = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20))
            asked = start if not history else {}
            answer = driver.turn(1, given, max_tokens=4, ignore_eos=True, **asked)
            assert answer.status.rebuilt is (part > 0 and turn == 0)
            history += given
            for token_id in answer.token_ids:
                generated[len(history) - gap] = driver.logits[1, len(history)]
                history.append(token_id)
            told += [*given, *answer.token_ids]
            assert answer.status.context_len == len(history)
            assert answer.status.kept_len == len(history) - window.evicted(len(history))
        assert len(generated) == 32
        check_sampled(windowed_logits(model, told, window), told, generated, TOLERANCE)
        assert window.evicted(len(told)) >= 2 * window.slack, "the window slid too little"

        other = driver.turn(2 + part, [9 + part] * (MAX_CONTEXT - 1), start=True, end=True, max_tokens=1)
        assert other.error is None
        assert find(driver).kv_place == "tokens", "it did not have to give way"
        first_kept = window.num_sinks + window.droppable(len(history))
        assert find(driver).context.first_kept == first_kept
        told = history[: window.num_sinks] + history[first_kept:]


@PATHS
@pytest.mark.parametrize(
    "window", [Window(16, 30, 16), Window(16, 40, 32), Window(0, 40, 16)], ids=["small", "wide", "without sinks"]
)
def test_what_is_lost_is_computed_from_the_sinks_and_the_window(
    window: Window, new_runner: Callable[..., ModelRunner]
) -> None:
    check_rebuilt(models.llama(), window, new_runner=new_runner)


@pytest.mark.parametrize("max_batch_tokens", [1, 7])
def test_chunking_changes_nothing(max_batch_tokens: int) -> None:
    check_rebuilt(models.grouped_heads(), Window(16, 40, 32), max_batch_tokens=max_batch_tokens)


@pytest.mark.parametrize("new_model", [models.sliding_window, models.only_sliding])
def test_layers_with_a_window_of_their_own_begin_behind_the_gap(new_model: Callable[[], PreTrainedModel]) -> None:
    """Without sinks: those that look back less far than the session do not see sinks that have moved up."""
    check_rebuilt(new_model(), Window(0, 40, 16), max_batch_tokens=256)
