"""Tests of engine: a session's life from START to END, and what is refused on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microturn.engine.wiring import build_engine
from microturn.errors import ContextFull, InvalidArgument, MicroturnError
from microturn.sessions.inputs import EmbedInput, TokenInput, TurnInput
from microturn.sessions.turn import Turn, TurnRequest
from support.driver import IdsOnly, Recorder
from support.fake_runner import HIDDEN_SIZE, VOCAB_SIZE, FakeDriver, expected_tokens


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=64)


def context_len(driver: FakeDriver, session_id: int | str = 1) -> int:
    """What a session says of its length."""
    return driver.turn(session_id).status.context_len


# ---- turns that go well --------------------------------------------------------------------------------------------


def test_the_first_turn_opens_a_session_and_is_answered(driver: FakeDriver) -> None:
    answer = driver.turn(1, [5, 6, 7], start=True, max_tokens=4, seed=9)
    assert answer.token_ids == expected_tokens([5, 6, 7], 4)
    assert answer.status.finish_reason == "length"
    assert answer.status.stop_reason is None
    assert answer.status.context_len == answer.status.kept_len == 7
    assert answer.status.seed == 9
    assert answer.status.expires_in_s == 60
    assert dict(answer.status.usage) == {
        "input_tokens": 3,
        "output_tokens": 4,
        "computed_tokens": 6,  # the last token has its KV computed with the next append
        "cached_tokens": 0,
    }


def test_later_turns_send_only_what_is_new(driver: FakeDriver) -> None:
    history = [5, 6, 7]
    history += driver.turn(1, history, start=True, max_tokens=4).token_ids
    for number, given in enumerate([[8, 9], [10], [11, 12, 13]], start=1):
        num_known = len(history)
        answer = driver.turn(1, given, max_tokens=3)
        history += given
        assert answer.token_ids == expected_tokens(history, 3)
        history += answer.token_ids
        assert answer.status.turn == number
        assert answer.status.context_len == len(history)
        assert answer.status.usage["cached_tokens"] == num_known - 1
        assert answer.status.usage["computed_tokens"] == 1 + len(given) + 2


def test_each_piece_tells_where_its_tokens_stand(driver: FakeDriver) -> None:
    driver.turn(1, [5, 6, 7], start=True, max_tokens=2)
    answer = driver.turn(1, [8], max_tokens=3)
    assert [output.position for output in answer.outputs] == [6, 7, 8]
    assert [len(output.token_ids) for output in answer.outputs] == [1, 1, 1]


def test_only_the_last_piece_has_a_status_and_it_brings_the_last_token(driver: FakeDriver) -> None:
    answer = driver.turn(1, [5], start=True, max_tokens=3)
    assert [output.status is None for output in answer.outputs] == [True, True, False]
    assert answer.outputs[-1].token_ids


def test_without_max_tokens_a_turn_generates_sixteen(driver: FakeDriver) -> None:
    assert len(driver.turn(1, [5], start=True).token_ids) == 16


def test_appending_generates_nothing(driver: FakeDriver) -> None:
    answer = driver.turn(1, [5, 6, 7], start=True, max_tokens=0)
    assert answer.token_ids == []
    assert answer.status.finish_reason == "append"
    assert answer.status.context_len == 3
    assert answer.status.usage["computed_tokens"] == 2


def test_what_was_appended_is_generated_from_with_an_empty_input(driver: FakeDriver) -> None:
    driver.turn(1, [5, 6], start=True, max_tokens=0)
    driver.turn(1, [7], max_tokens=0)
    answer = driver.turn(1, max_tokens=5)
    assert answer.token_ids == expected_tokens([5, 6, 7], 5)
    assert driver.turn(1, max_tokens=2).token_ids == expected_tokens([5, 6, 7], 7)[5:]


def test_a_keep_alive_computes_and_appends_nothing(driver: FakeDriver) -> None:
    driver.turn(1, [5, 6], start=True, max_tokens=2)
    num_batches = len(driver.runner.batches)
    answer = driver.turn(1)
    assert answer.status.finish_reason == "append"
    assert answer.status.context_len == 4
    assert len(driver.runner.batches) == num_batches


def test_start_with_nothing_opens_an_empty_session(driver: FakeDriver) -> None:
    assert driver.turn(1, start=True).status.context_len == 0
    assert driver.turn(1, [5], max_tokens=2).token_ids == expected_tokens([5], 2)


def test_a_long_prompt_is_computed_in_chunks_and_answered_the_same() -> None:
    driver = FakeDriver(max_batch_tokens=8)
    prompt = [n % VOCAB_SIZE for n in range(100)]
    answer = driver.turn(1, prompt, start=True, max_tokens=3)
    assert answer.token_ids == expected_tokens(prompt, 3)
    assert max(batch.num_tokens for batch in driver.runner.batches) == 8
    assert driver.runner.num_tokens == 102


def test_sessions_share_a_forward_pass_and_not_their_tokens(driver: FakeDriver) -> None:
    """B2: two first turns in one prefill batch crashed the scheduler."""
    answers = [driver.post(number, [number, 5], start=True, max_tokens=4)[0] for number in range(1, 9)]
    driver.run()
    assert len(driver.runner.batches) == 4
    for number, answer in enumerate(answers, start=1):
        assert answer.token_ids == expected_tokens([number, 5], 4)


def test_integer_and_string_ids_are_different_sessions(driver: FakeDriver) -> None:
    driver.turn(7, [5], start=True, max_tokens=0)
    assert driver.turn("7", [6]).code == "NOT_FOUND"
    driver.turn("7", [6, 7], start=True, max_tokens=0)
    assert context_len(driver, 7) == 1
    assert context_len(driver, "7") == 2


# ---- embeddings ----------------------------------------------------------------------------------------------------


def test_embeddings_stand_in_the_context_like_tokens(driver: FakeDriver) -> None:
    embeds = torch.arange(12.0).reshape(3, HIDDEN_SIZE)
    driver.turn(1, [5], start=True, max_tokens=0)
    answer = driver.turn(1, EmbedInput(embeds), max_tokens=2)
    assert answer.token_ids == expected_tokens([5, *embeds], 2)
    assert answer.status.usage["input_tokens"] == 3
    assert answer.status.context_len == 6
    later = driver.turn(1, [8], max_tokens=2)
    assert later.token_ids == expected_tokens([5, *embeds, *answer.token_ids, 8], 2)


def test_embeddings_are_computed_again_like_tokens() -> None:
    """What came as embeddings must survive the loss of its pages."""
    driver = FakeDriver(num_pages=8, max_batch_tokens=3)
    embeds = torch.arange(40.0).reshape(10, HIDDEN_SIZE)
    driver.turn(1, EmbedInput(embeds), start=True, max_tokens=0)
    driver.turn(2, [9] * 28, start=True, max_tokens=0)
    answer = driver.turn(1, [8], max_tokens=2)
    assert answer.status.usage["cached_tokens"] == 0
    assert answer.token_ids == expected_tokens([*embeds, 8], 2)


# ---- END -----------------------------------------------------------------------------------------------------------


def test_end_closes_the_session_and_frees_its_pages(driver: FakeDriver) -> None:
    driver.turn(1, [5] * 9, start=True, max_tokens=2)
    assert driver.pool.num_free < 128
    answer = driver.turn(1, end=True)
    assert answer.status.finish_reason == "closed"
    assert driver.pool.num_free == 128
    assert driver.turn(1, [5]).code == "NOT_FOUND"


def test_the_last_turn_is_answered_before_the_session_closes(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    answer = driver.turn(1, [6], end=True, max_tokens=3)
    assert len(answer.token_ids) == 3
    assert answer.status.finish_reason == "length"
    assert driver.turn(1).code == "NOT_FOUND"


def test_a_session_of_one_turn_has_start_and_end(driver: FakeDriver) -> None:
    answer = driver.turn(1, [5, 6], start=True, end=True, max_tokens=3)
    assert answer.token_ids == expected_tokens([5, 6], 3)
    assert driver.pool.num_free == 128
    assert driver.turn(1).code == "NOT_FOUND"


def test_end_on_a_running_session_waits_for_it(driver: FakeDriver) -> None:
    """B15: a close during decode ended the turn that ran, or crashed."""
    answer, _ = driver.post(1, [5], start=True, max_tokens=6)
    driver.engine.step()
    closing, _ = driver.post(1, end=True)
    driver.run()
    assert answer.token_ids == expected_tokens([5], 6)
    assert closing.status.finish_reason == "closed"
    assert driver.pool.num_free == 128


def test_a_turn_behind_end_is_refused_and_the_close_goes_on(driver: FakeDriver) -> None:
    """B15: a close that raced other turns was lost, or closed twice."""
    answer, _ = driver.post(1, [5], start=True, max_tokens=6)
    driver.post(1, end=True)
    late, _ = driver.post(1, [6])
    again, _ = driver.post(1, end=True)
    driver.run()
    assert answer.status.finish_reason == "length"
    assert late.code == again.code == "FAILED_PRECONDITION"
    assert driver.turn(1, end=True).code == "NOT_FOUND"


def test_the_close_of_an_unknown_session_is_not_a_success(driver: FakeDriver) -> None:
    """B15: it was answered with success."""
    assert driver.turn(1, end=True).code == "NOT_FOUND"


@pytest.mark.parametrize(
    ("given", "values"),
    [([VOCAB_SIZE], {}), ([5] * 70, {}), ([5], {"stop_token_ids": [VOCAB_SIZE]}), ([5], {"max_tokens": 64})],
)
def test_end_closes_even_when_its_turn_is_refused(driver: FakeDriver, given: list[int], values: dict[str, Any]) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    assert driver.turn(1, given, end=True, **values).error is not None
    assert driver.pool.num_free == 128
    assert driver.turn(1).code == "NOT_FOUND"


def test_a_refused_end_lets_the_running_turn_finish_first(driver: FakeDriver) -> None:
    answer, _ = driver.post(1, [5], start=True, max_tokens=4)
    driver.engine.step()
    refused, _ = driver.post(1, [VOCAB_SIZE], end=True)
    driver.run()
    assert refused.code == "INVALID_ARGUMENT"
    assert answer.token_ids == expected_tokens([5], 4)
    assert driver.turn(1).code == "NOT_FOUND"


# ---- START on an id that is known ----------------------------------------------------------------------------------


def test_start_on_a_live_id_begins_anew(driver: FakeDriver) -> None:
    driver.turn(1, [5] * 9, start=True, max_tokens=2, seed=3)
    answer = driver.turn(1, [6], start=True, max_tokens=2)
    assert answer.token_ids == expected_tokens([6], 2)
    assert answer.status.turn == 0
    assert driver.pool.num_free == 127


def test_start_on_a_live_id_cancels_what_runs_and_waits_there(driver: FakeDriver) -> None:
    running, _ = driver.post(1, [5], start=True, max_tokens=20)
    waiting, _ = driver.post(1, [6], max_tokens=20)
    driver.engine.step()
    answer, _ = driver.post(1, [7], start=True, max_tokens=2)
    driver.run()
    assert running.status.finish_reason == waiting.status.finish_reason == "cancelled"
    assert answer.token_ids == expected_tokens([7], 2)
    assert context_len(driver) == 3


def test_two_starts_at_once_leave_the_second(driver: FakeDriver) -> None:
    """B2: two first turns of one session in the same prefill batch crashed the scheduler."""
    first, _ = driver.post(1, [5, 6], start=True, max_tokens=3)
    second, _ = driver.post(1, [7, 8], start=True, max_tokens=3)
    driver.run()
    assert first.status.finish_reason == "cancelled"
    assert second.token_ids == expected_tokens([7, 8], 3)


@pytest.mark.parametrize(
    ("given", "values"), [([VOCAB_SIZE], {}), ([5], {"max_context": 65}), ([5] * 60, {}), ([], {"max_tokens": 1})]
)
def test_a_start_that_is_refused_resets_nothing(driver: FakeDriver, given: list[int], values: dict[str, Any]) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    assert driver.turn(1, given, start=True, **values).error is not None
    assert driver.turn(1, [6], max_tokens=2).token_ids == expected_tokens([5, *expected_tokens([5], 2), 6], 2)


def test_start_begins_anew_on_a_closed_id(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, end=True, max_tokens=2)
    assert driver.turn(1, [6], start=True, max_tokens=2).token_ids == expected_tokens([6], 2)


def test_a_refused_start_opens_nothing(driver: FakeDriver) -> None:
    assert driver.turn(1, [5], start=True, max_tokens=64).code == "CONTEXT_FULL"
    assert driver.turn(1, [5]).code == "NOT_FOUND"


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "values", "expected"),
    [
        ([VOCAB_SIZE], {}, "INVALID_ARGUMENT: input_ids are from 0 to 96"),
        ([5, -1], {}, "INVALID_ARGUMENT: input_ids are from 0 to 96"),
        ([5], {"stop_token_ids": [VOCAB_SIZE]}, "INVALID_ARGUMENT: stop_token_ids are from 0 to 96"),
        (EmbedInput(torch.zeros(2, 5)), {}, r"INVALID_ARGUMENT: input_embeds are \[1, n, 4\], not \[1, n, 5\]"),
        (EmbedInput(torch.full((1, 4), torch.nan)), {}, "INVALID_ARGUMENT: input_embeds hold a value that is not fin"),
        (EmbedInput(torch.full((1, 4), torch.inf)), {}, "INVALID_ARGUMENT: input_embeds hold a value that is not fin"),
        ([5] * 59, {"max_tokens": 0}, "CONTEXT_FULL: 6 tokens of context, 59 of input and max_tokens=0 exceed"),
        ([5], {"max_tokens": 58}, "CONTEXT_FULL: 6 tokens of context, 1 of input and max_tokens=58 exceed"),
    ],
)
def test_a_refused_turn_changes_nothing_and_costs_no_forward_pass(
    driver: FakeDriver, given: TurnInput | list[int], values: dict[str, Any], expected: str
) -> None:
    """A rejected turn was still queued and cost a forward pass."""
    history = [5, 6, 7]
    history += driver.turn(1, history, start=True, max_tokens=3).token_ids
    num_batches, num_free = len(driver.runner.batches), driver.pool.num_free
    refused = driver.turn(1, given, **values)
    with pytest.raises(MicroturnError, match=expected):
        _ = refused.status
    assert len(driver.runner.batches) == num_batches
    assert driver.pool.num_free == num_free
    assert context_len(driver) == 6
    assert driver.turn(1, [8], max_tokens=2).token_ids == expected_tokens([*history, 8], 2)


def test_a_model_that_takes_no_embeddings_says_so() -> None:
    driver = FakeDriver(accepts_embeds=False)
    refused = driver.turn(1, EmbedInput(torch.zeros(2, HIDDEN_SIZE)), start=True)
    with pytest.raises(InvalidArgument, match="this model takes no input_embeds: send ids or text"):
        _ = refused.status


def test_there_is_nothing_to_generate_from_in_an_empty_context(driver: FakeDriver) -> None:
    assert driver.turn(1, start=True, max_tokens=4).code == "INVALID_ARGUMENT"
    driver.turn(1, start=True)
    assert driver.turn(1, max_tokens=4).code == "INVALID_ARGUMENT"
    assert driver.turn(1, [5], max_tokens=1).token_ids == expected_tokens([5], 1)


def test_what_was_refused_on_the_way_is_told_and_end_still_closes(driver: FakeDriver) -> None:
    """The adapter refuses what it cannot read; such a turn travels on, because its END counts."""
    driver.turn(1, [5], start=True, max_tokens=0)
    sinks = [Recorder(), Recorder()]
    request = TurnRequest(1, TokenInput(()), sinks[0], driver.clock(), refusal=InvalidArgument("send one input"))
    driver.engine.submit(Turn(request))
    driver.run()
    assert sinks[0].error is request.refusal
    assert context_len(driver) == 1
    driver.engine.submit(Turn(replace(request, sink=sinks[1], end=True)))
    driver.run()
    assert sinks[1].error is request.refusal
    assert driver.turn(1).code == "NOT_FOUND"


@pytest.mark.parametrize("max_tokens", [0, 1, 30])
def test_a_context_is_filled_to_the_last_token_and_never_clamped(driver: FakeDriver, max_tokens: int) -> None:
    """Near the limit `max_tokens` was clamped in silence."""
    given = [5] * (64 - max_tokens)
    assert driver.turn(1, [*given, 5], start=True, max_tokens=max_tokens).code == "CONTEXT_FULL"
    answer = driver.turn(1, given, start=True, max_tokens=max_tokens)
    assert len(answer.token_ids) == max_tokens
    assert answer.status.context_len == 64
    assert context_len(driver) == 64
    assert driver.turn(1, [5], max_tokens=0).code == "CONTEXT_FULL"
    assert driver.turn(1, max_tokens=1).code == "CONTEXT_FULL"


@pytest.mark.parametrize(("num_input", "room"), [(4, 54), (57, 1), (58, 0), (59, 0)])
def test_who_asks_for_too_many_tokens_is_told_how_many_there_are(driver: FakeDriver, num_input: int, room: int) -> None:
    driver.turn(1, [5] * 6, start=True, max_tokens=0)
    error = driver.turn(1, [5] * num_input, max_tokens=60).error
    assert isinstance(error, ContextFull)
    assert error.details == {"room": room}
    if room:
        assert driver.turn(1, [5] * num_input, max_tokens=room).status.context_len == 64


def test_a_turn_longer_than_the_context_leaves_the_session_alone(driver: FakeDriver) -> None:
    """B14: it destroyed the session's slot and made the accounting negative."""
    driver.turn(1, [5], start=True, max_tokens=0)
    assert driver.turn(1, [6] * 1000).code == "CONTEXT_FULL"
    assert driver.turn(1, [7], max_tokens=2).token_ids == expected_tokens([5, 7], 2)


def test_a_session_may_ask_for_a_shorter_context_and_not_for_a_longer_one(driver: FakeDriver) -> None:
    assert driver.turn(1, [5], start=True, max_context=65).code == "INVALID_ARGUMENT"
    driver.turn(1, [5], start=True, max_context=10, max_tokens=0)
    assert driver.turn(1, [6] * 8, max_tokens=2).code == "CONTEXT_FULL"
    assert driver.turn(1, [6] * 7, max_tokens=2).status.context_len == 10


def test_no_more_sessions_are_opened_than_declared() -> None:
    """A declared session capacity was stored and never enforced."""
    driver = FakeDriver(max_sessions=2)
    for session_id in (1, 2):
        driver.turn(session_id, [5], start=True, max_tokens=0)
    refused = driver.turn(3, [5], start=True)
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert refused.error is not None
    assert refused.error.details == {"retry_after_ms": 1000}
    driver.turn(1, [6], start=True, max_tokens=0)  # takes the place of the one that it resets
    driver.turn(2, end=True)
    assert driver.turn(3, [5], start=True, max_tokens=1).error is None


def test_a_pool_smaller_than_one_context_is_refused() -> None:
    driver = FakeDriver(num_pages=2)
    with pytest.raises(InvalidArgument, match="a pool of 2 pages of 4 tokens does not hold one context of 9 tokens"):
        build_engine(driver.engine.settings, driver.runner, driver.pool, max_context=9, new_codec=lambda _: IdsOnly())
