"""Tests of engine: when a generation ends, and with which tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.inputs import EmbedInput
from microturn.sessions.options import TurnOptions
from microturn.sessions.token_counts import TokenCounts
from support.fake_runner import HIDDEN_SIZE, FakeDriver, expected_logits, expected_tokens

PROMPT = [5, 6, 9]
ANSWER = expected_tokens(PROMPT, 12)


def driver_with(*eos_ids: int, **kwargs: Any) -> FakeDriver:
    return FakeDriver(max_context=128, eos_ids=frozenset(eos_ids), **kwargs)


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_the_answer_repeats_no_token_that_the_tests_stop_at() -> None:
    """What the tests below rely on."""
    assert len(set(ANSWER)) == len(ANSWER)


def test_an_eos_ends_the_answer_and_stays_in_the_context() -> None:
    driver = driver_with(ANSWER[3])
    answer = driver.turn(1, PROMPT, start=True, max_tokens=12)
    assert answer.token_ids == ANSWER[:4]
    assert answer.status.finish_reason == "stop"
    assert answer.status.stop_reason == ANSWER[3]
    assert answer.status.context_len == 7
    assert driver.turn(1, [8], max_tokens=1).token_ids == expected_tokens([*PROMPT, *ANSWER[:4], 8], 1)


def test_an_eos_can_be_ignored() -> None:
    answer = driver_with(ANSWER[3]).turn(1, PROMPT, start=True, max_tokens=12, ignore_eos=True)
    assert answer.token_ids == ANSWER
    assert answer.status.finish_reason == "length"


def test_stop_token_ids_end_the_answer_even_when_eos_is_ignored() -> None:
    driver = driver_with(ANSWER[1])
    answer = driver.turn(1, PROMPT, start=True, max_tokens=12, ignore_eos=True, stop_token_ids=[90, ANSWER[2]])
    assert answer.token_ids == ANSWER[:3]
    assert answer.status.stop_reason == ANSWER[2]


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    answer = driver_with(ANSWER[3]).turn(1, PROMPT, start=True, max_tokens=4)
    assert answer.status.finish_reason == "stop"


def test_no_token_is_kept_past_max_tokens() -> None:
    """B17-B20: overshoot past max_tokens was kept."""
    driver = driver_with()
    for number in range(6):
        answer = driver.turn(1, PROMPT, start=number == 0, max_tokens=5)
        assert len(answer.token_ids) == 5
        assert answer.status.context_len == 8 * (number + 1)


def expected_without(banned_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer to PROMPT when some tokens may not come."""
    history = list(PROMPT)
    for _ in range(num_tokens):
        logits = expected_logits(history)
        logits[list(banned_ids)] = float("-inf")
        history.append(int(logits.argmax()))
    return history[len(PROMPT) :]


def test_before_min_tokens_neither_eos_nor_a_stop_token_comes() -> None:
    driver = driver_with(ANSWER[1])
    answer = driver.turn(1, PROMPT, start=True, max_tokens=8, min_tokens=3, stop_token_ids=[ANSWER[2]])
    expected = expected_without([ANSWER[1], ANSWER[2]], 3)
    expected += expected_tokens([*PROMPT, *expected], 5)
    assert answer.token_ids[:3] == expected[:3]
    assert answer.token_ids == expected[: len(answer.token_ids)]


def test_from_min_tokens_on_an_answer_may_end() -> None:
    driver = driver_with(ANSWER[3])
    assert driver.turn(1, PROMPT, start=True, max_tokens=12, min_tokens=3).token_ids == ANSWER[:4]
    answer = driver.turn(2, PROMPT, start=True, max_tokens=12, min_tokens=4).token_ids
    assert answer[:4] == expected_without([ANSWER[3]], 4)


def test_an_eos_that_is_ignored_may_come_before_min_tokens() -> None:
    """It does not end the answer, so there is no reason to keep it from coming."""
    answer = driver_with(ANSWER[1]).turn(1, PROMPT, start=True, max_tokens=6, min_tokens=4, ignore_eos=True)
    assert answer.token_ids == ANSWER[:6]


# ---- what is sampled -----------------------------------------------------------------------------------------------


def expected_sampled(history: Sequence[int], num_tokens: int, *, seed: int, **options: Any) -> list[int]:
    """The tokens that must be sampled behind a history."""
    tokens = list(history)
    for _ in range(num_tokens):
        row = SamplingRow(TurnOptions(**options), seed, len(tokens), TokenCounts.of(tokens))
        tokens.append(draw(expected_logits(tokens)[None], [row]).sampled()[0].token_id)
    return tokens[len(history) :]


def test_a_seeded_answer_is_the_same_in_one_turn_and_in_several() -> None:
    options = {"temperature": 1.0, "top_p": 0.9}
    expected = expected_sampled(PROMPT, 9, seed=4, **options)
    driver = driver_with()
    assert driver.turn(1, PROMPT, start=True, max_tokens=9, seed=4, **options).token_ids == expected
    parts = driver.turn(2, PROMPT[:1], start=True, max_tokens=0, seed=4, **options).token_ids
    parts += driver.turn(2, PROMPT[1:], max_tokens=4).token_ids
    parts += driver.turn(2, max_tokens=5).token_ids
    assert parts == expected


def test_a_seeded_answer_is_the_same_in_company_and_under_pressure() -> None:
    options = {"temperature": 1.0, "repetition_penalty": 1.4}
    expected = expected_sampled(PROMPT, 20, seed=4, **options)
    driver = driver_with(num_pages=32, max_batch_tokens=5)
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=20, seed=4, **options)
    for session_id in range(2, 10):
        driver.post(session_id, [session_id] * 20, start=True, max_tokens=20, temperature=1.0)
    driver.run()
    assert answer.token_ids == expected


def test_another_seed_gives_another_answer() -> None:
    driver = driver_with()
    answers = {
        tuple(driver.turn(n, PROMPT, start=True, max_tokens=9, temperature=2.0, seed=n).token_ids) for n in range(1, 5)
    }
    assert len(answers) == 4


def test_penalties_see_the_whole_context_of_the_session() -> None:
    """Not the turn's input alone."""
    driver = driver_with()
    first = driver.turn(1, PROMPT, start=True, max_tokens=3, seed=1, presence_penalty=100.0).token_ids
    second = driver.turn(1, [96], max_tokens=3, presence_penalty=100.0).token_ids
    assert first == expected_sampled(PROMPT, 3, seed=1, presence_penalty=100.0)
    assert second == expected_sampled([*PROMPT, *first, 96], 3, seed=1, presence_penalty=100.0)
    assert len({*PROMPT, *first, 96, *second}) == 10


@pytest.mark.parametrize("mark", [ANSWER[0], 95])
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_marks_between_messages_do_not_become_unlikely_as_a_chat_grows(mark: int, penalty: str) -> None:
    """The end of each message counted: with a dozen of them an answer had no end any more."""
    driver = driver_with(ANSWER[0], control_ids=frozenset({95}))
    options: dict[str, Any] = {"start": True, "max_tokens": 2, penalty: 100.0}
    answer = driver.turn(1, [5, mark] * 12, logit_bias=json.dumps({mark: 50}), **options)
    assert answer.token_ids[0] == mark
    assert (answer.status.finish_reason == "stop") is (mark == ANSWER[0])
    answer = driver.turn(2, [5, mark] * 12, logit_bias=json.dumps({5: 50}), **options)
    assert 5 not in answer.token_ids, "what is text counts"


def test_penalties_do_not_take_the_place_of_an_embedding_for_a_token() -> None:
    """In the list of ids an embedding stands as id 0, which the penalty then hit."""
    embeds = next(
        embeds
        for number in range(1000)
        if int(expected_logits([*(embeds := torch.full((2, HIDDEN_SIZE), float(number)))]).argmax()) == 0
    )
    answer = driver_with().turn(1, EmbedInput(embeds), start=True, max_tokens=1, presence_penalty=100.0)
    assert answer.token_ids == [0]


def test_logprobs_come_with_their_tokens_when_asked_for() -> None:
    driver = driver_with()
    answer = driver.turn(1, PROMPT, start=True, max_tokens=3, logprobs=True)
    history = list(PROMPT)
    for output in answer.outputs:
        expected = expected_logits(history).log_softmax(-1)[output.token_ids[0]]
        assert torch.tensor(output.logprobs[0]).isclose(expected)
        history += output.token_ids
    assert driver.turn(2, PROMPT, start=True, max_tokens=1).outputs[0].logprobs == ()


def test_the_likeliest_tokens_come_with_each_token_when_asked_for() -> None:
    driver = driver_with()
    answer = driver.turn(1, PROMPT, start=True, max_tokens=3, logprobs=4)
    history = list(PROMPT)
    for output in answer.outputs:
        expected = expected_logits(history).log_softmax(-1).topk(4)
        [top] = output.top_logprobs
        assert [token_id for token_id, _ in top] == expected.indices.tolist()
        assert torch.tensor([logprob for _, logprob in top]).allclose(expected.values)
        assert top[0] == (output.token_ids[0], output.logprobs[0])
        history += output.token_ids
    assert driver.turn(1, max_tokens=1, logprobs=True).outputs[0].top_logprobs == ()


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_appended_ids_come_with_the_last_piece_when_asked_for(max_tokens: int) -> None:
    driver = driver_with()
    asked = driver.turn(1, PROMPT, start=True, max_tokens=max_tokens, return_appended_ids=True)
    assert [output.appended_ids for output in asked.outputs[:-1]] == [None] * (len(asked.outputs) - 1)
    assert asked.outputs[-1].appended_ids == tuple(PROMPT)
    assert driver.turn(2, PROMPT, start=True, max_tokens=max_tokens).outputs[-1].appended_ids is None
    assert driver.turn(1, return_appended_ids=True).outputs[-1].appended_ids == ()
