"""Oracles 1 and 2: sessions in turns, in company, equal one forward pass of the stock model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from microturn.model.runner import ModelRunner
from support.driver import Driver, asynchronous_runner, model_runner
from support.models import VOCAB_SIZE
from support.oracle import check_incremental, stock_greedy
from support.paths import PATHS
from support.rounded import exact_of


@PATHS
@pytest.mark.parametrize(("seed", "num_sessions"), [(0, 1), (1, 2), (2, 5), (3, 16)])
def test_any_split_in_any_company_gives_the_logits_of_the_whole(
    tiny_model: PreTrainedModel, seed: int, num_sessions: int, new_runner: Callable[..., ModelRunner]
) -> None:
    check_incremental(tiny_model, range(VOCAB_SIZE), seed=seed, num_sessions=num_sessions, new_runner=new_runner)


@pytest.mark.parametrize("max_batch_tokens", [1, 7, pytest.param(500, marks=pytest.mark.all_processors)])
def test_chunking_changes_nothing(tiny_model: PreTrainedModel, max_batch_tokens: int) -> None:
    check_incremental(
        tiny_model, range(VOCAB_SIZE), seed=4, num_sessions=3, num_turns=3, max_batch_tokens=max_batch_tokens
    )


@pytest.mark.parametrize(("seed", "num_sessions"), [(5, 1), (7, 8)])
def test_running_ahead_changes_nothing(tiny_model: PreTrainedModel, seed: int, num_sessions: int) -> None:
    check_incremental(
        tiny_model, range(VOCAB_SIZE), seed=seed, num_sessions=num_sessions, new_runner=asynchronous_runner
    )


@pytest.mark.all_processors
@pytest.mark.parametrize(("seed", "num_sessions"), [(0, 1), (1, 4), (2, 16)])
def test_real_weights_in_turns_and_company_equal_the_whole(
    real_model: PreTrainedModel, seed: int, num_sessions: int
) -> None:
    check_incremental(
        real_model, range(17, 49152), seed=seed, num_sessions=num_sessions, num_turns=3, max_batch_tokens=128
    )


def test_preemption_changes_no_token(tiny_model: PreTrainedModel) -> None:
    """Eight sessions want 8 x 7 pages and there are 20: they are preempted and computed again, all the time."""
    prompts = [[(7 * session + 3 * at) % VOCAB_SIZE for at in range(60)] for session in range(8)]
    runner = model_runner(tiny_model, num_pages=20, page_size=16)
    driver = Driver(runner, num_pages=20, page_size=16, max_context=200, max_batch_tokens=64)
    recorders = [driver.post(n + 1, prompt, start=True, max_tokens=40)[0] for n, prompt in enumerate(prompts)]
    driver.run()
    for prompt, recorder in zip(prompts, recorders, strict=True):
        if exact_of(tiny_model) is None:
            assert recorder.token_ids == stock_greedy(tiny_model, prompt, 40)
        else:  # a stock model that rounds alike rounds some elements to the next integer: see `support.oracle`
            alone = Driver(model_runner(tiny_model)).turn(1, prompt, start=True, max_tokens=40)
            assert recorder.token_ids == alone.token_ids
    assert sum(recorder.status.usage["computed_tokens"] for recorder in recorders) > 8 * 100, "nothing was preempted"
