"""Tests of engine: with speculation a turn answers as without it, in fewer passes, and makes nobody late.

What is drafted is replaced by what will be answered, up to a place where it is wrong (see `support.foreseen`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from microturn.sessions import speculation
from support.fake_runner import VOCAB_SIZE, FakeDriver, expected_tokens
from support.foreseen import foreseen

PROMPT = [5, 6, 9]
ANSWER = expected_tokens(PROMPT, 24)
SPECULATE = {"speculate": "ngram"}


class Foreseen:
    """Drafts of which so many tokens are right."""

    def __init__(self, num_right: int) -> None:
        self._num_right = num_right
        self.num_drafts = 0

    def __call__(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        self.num_drafts += 1
        return foreseen(token_ids, num_tokens, num_right=self._num_right)


@pytest.fixture
def all_right(monkeypatch: pytest.MonkeyPatch) -> Foreseen:
    drafts = Foreseen(1000)
    monkeypatch.setattr(speculation, "look_up", drafts)
    return drafts


def driver_with(**kwargs: Any) -> FakeDriver:
    return FakeDriver(max_context=128, **kwargs)


@pytest.mark.usefixtures("all_right")
def test_right_drafts_make_several_tokens_a_pass() -> None:
    driver = driver_with()
    answer = driver.turn(1, PROMPT, start=True, max_tokens=24, **SPECULATE)
    assert answer.token_ids == ANSWER
    assert [output.position for output in answer.outputs] == list(range(3, 27))
    # 4 + 1, 8 + 1, and the 10 that are left.
    assert len(driver.runner.batches) == 3
    usage = answer.status.usage
    assert (usage["drafted_tokens"], usage["accepted_tokens"]) == (21, 21)
    assert usage["computed_tokens"] == len(PROMPT) + 23
    after = driver.turn(1, [8], max_tokens=2, speculate="off")
    assert after.token_ids == expected_tokens([*PROMPT, *ANSWER, 8], 2)
    assert after.status.usage["cached_tokens"] == len(PROMPT) + 23


def test_it_is_off_unless_asked_for(all_right: Foreseen) -> None:
    driver = driver_with()
    answer = driver.turn(1, PROMPT, start=True, max_tokens=4)
    assert answer.token_ids == ANSWER[:4]
    assert (len(driver.runner.batches), all_right.num_drafts) == (4, 0)


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_draft_counts_up_to_its_first_wrong_token(monkeypatch: pytest.MonkeyPatch, num_right: int) -> None:
    monkeypatch.setattr(speculation, "look_up", Foreseen(num_right))
    driver = driver_with()
    answer = driver.turn(1, PROMPT, start=True, max_tokens=24, **SPECULATE)
    assert answer.token_ids == ANSWER
    assert answer.status.context_len == len(PROMPT) + 24
    usage = answer.status.usage
    assert usage["accepted_tokens"] == num_right if num_right == 0 else usage["accepted_tokens"] > 0
    assert usage["computed_tokens"] == len(PROMPT) + 23, "refused tokens are not counted"
    driver.engine.check_integrity()


@pytest.mark.parametrize("at", range(9))
@pytest.mark.usefixtures("all_right")
def test_what_ends_a_turn_ends_it_inside_a_draft_too(at: int) -> None:
    driver = driver_with(eos_ids=frozenset({ANSWER[at]}))
    answer = driver.turn(1, PROMPT, start=True, max_tokens=24, **SPECULATE)
    assert answer.token_ids == ANSWER[: at + 1]
    assert answer.status.stop_reason == ANSWER[at]
    assert answer.status.context_len == len(PROMPT) + at + 1
    after = driver.turn(1, [8], max_tokens=2)
    assert after.token_ids == expected_tokens([*PROMPT, *ANSWER[: at + 1], 8], 2)
    driver.engine.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": True},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.7, "presence_penalty": 1.0, "seed": 5},
        {"min_tokens": 9},
        {"stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
        {"min_tokens": 5, "stop_token_ids": list(range(0, VOCAB_SIZE, 3))},
    ],
)
def test_sampling_is_as_without_it(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Drafts here are the very tokens that come, or those but for one."""
    plain = driver_with(eos_ids=frozenset({ANSWER[1]})).turn(1, PROMPT, start=True, max_tokens=24, **options)
    rng = random.Random(1)
    num_accepted = 0
    for _ in range(20):

        def draft(token_ids: Sequence[int], num_tokens: int) -> list[int]:
            coming = plain.token_ids[len(token_ids) - len(PROMPT) :][:num_tokens]
            if coming and rng.random() < 0.6:
                coming[rng.randrange(len(coming))] += 1
            return coming

        monkeypatch.setattr(speculation, "look_up", draft)
        answer = driver_with(eos_ids=frozenset({ANSWER[1]})).turn(
            1, PROMPT, start=True, max_tokens=24, **options, **SPECULATE
        )
        assert answer.token_ids == plain.token_ids
        assert [output.logprobs for output in answer.outputs] == [output.logprobs for output in plain.outputs]
        assert answer.status.finish_reason == plain.status.finish_reason
        assert answer.status.stop_reason == plain.status.stop_reason
        num_accepted += answer.status.usage["accepted_tokens"]
    assert num_accepted or len(plain.token_ids) < 3


@pytest.mark.usefixtures("all_right")
def test_a_draft_takes_no_page_from_another_session() -> None:
    """The pool has room for both sessions, and for no draft besides."""
    driver = driver_with(num_pages=32, page_size=4)
    other, _ = driver.post(2, [at % 90 for at in range(109)], start=True, max_tokens=8)
    first, _ = driver.post(1, PROMPT, start=True, max_tokens=8, **SPECULATE)
    driver.run()
    assert first.token_ids == ANSWER[:8]
    assert other.status.usage["computed_tokens"] == 116, "it was preempted"
    driver.engine.check_integrity()


def test_an_asynchronous_runner_runs_ahead_instead(all_right: Foreseen) -> None:
    driver = driver_with(is_asynchronous=True)
    answer = driver.turn(1, PROMPT, start=True, max_tokens=8, **SPECULATE)
    assert answer.token_ids == ANSWER[:8]
    assert all_right.num_drafts == 0


@pytest.mark.usefixtures("all_right")
def test_a_window_that_slides_ends_a_draft() -> None:
    window = {"overflow": "window", "window_tokens": 16, "sink_tokens": 4}
    plain = driver_with(window_slack=8).turn(1, PROMPT, start=True, max_tokens=60, speculate="off", **window)
    speculating = driver_with(window_slack=8).turn(1, PROMPT, start=True, max_tokens=60, **window, **SPECULATE)
    assert speculating.token_ids == plain.token_ids
    assert speculating.status.usage["accepted_tokens"]
