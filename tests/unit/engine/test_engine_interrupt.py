"""Tests of engine: turns that end those before them (barge-in), and what is left of those."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from microturn.sessions.inputs import EmbedInput, TextInput
from microturn.sessions.turn import Turn
from support.driver import Recorder
from support.fake_runner import HIDDEN_SIZE, VOCAB_SIZE, FakeDriver, expected_tokens

PROMPT = [5, 6, 7]
INTERRUPT: dict[str, Any] = {"on_overlap": "interrupt"}


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256, max_batch_tokens=16)


def speak(driver: FakeDriver, num_tokens: int, **values: Any) -> tuple[Recorder, list[int]]:
    """A first turn that has said so many tokens of 100, and the history so far."""
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=100, **values)
    driver.steps(num_tokens)
    assert len(answer.token_ids) == num_tokens
    return answer, [*PROMPT, *answer.token_ids]


def context_len(driver: FakeDriver) -> int:
    return driver.turn(1).status.context_len


# ---- what is stopped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_said", [1, 2, 9])
def test_an_answer_stops_before_its_next_token_and_what_was_said_stays(driver: FakeDriver, num_said: int) -> None:
    """A cancelled turn looked like a finished one to the client."""
    answer, history = speak(driver, num_said)
    new, _ = driver.post(1, [8], max_tokens=4, **INTERRUPT)
    driver.run()
    assert answer.token_ids == expected_tokens(PROMPT, num_said)
    assert answer.status.finish_reason == "interrupted"
    assert answer.status.context_len == answer.status.kept_len == len(history)
    assert answer.status.usage["output_tokens"] == num_said
    assert new.token_ids == expected_tokens([*history, 8], 4)
    assert new.status.turn == 1
    assert new.status.context_len == len(history) + 5


def test_an_interrupt_keeps_the_kv(driver: FakeDriver) -> None:
    """Cancelling a turn (barge-in) dropped the whole session's KV, so the next turn re-prefilled everything."""
    _, history = speak(driver, 9)
    num_computed = driver.runner.num_tokens
    new = driver.turn(1, [8, 9], max_tokens=3, **INTERRUPT)
    assert new.status.usage["cached_tokens"] == len(history) - 1
    assert new.status.usage["computed_tokens"] == 3 + 2
    assert driver.runner.num_tokens == num_computed + 3 + 2


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_prompt_that_is_still_computed_stays_and_is_computed_once(driver: FakeDriver, num_steps: int) -> None:
    prompt = [n % VOCAB_SIZE for n in range(60)]
    answer, _ = driver.post(1, prompt, start=True, max_tokens=100)
    driver.steps(num_steps)
    new, _ = driver.post(1, [8], max_tokens=3, **INTERRUPT)
    driver.run()
    assert answer.token_ids == []
    assert answer.status.finish_reason == "interrupted"
    assert answer.status.context_len == 60
    assert new.token_ids == expected_tokens([*prompt, 8], 3)
    assert driver.runner.num_tokens == 60 + 1 + 2


def test_embeddings_of_an_interrupted_turn_stay(driver: FakeDriver) -> None:
    embeds = torch.arange(24.0).reshape(6, HIDDEN_SIZE)
    answer, _ = driver.post(1, EmbedInput(embeds), start=True, max_tokens=50)
    driver.steps(2)
    new = driver.turn(1, [8], max_tokens=3, rewind_to=4, **INTERRUPT)
    assert answer.status.context_len == 4
    assert new.token_ids == expected_tokens([*embeds[:4], 8], 3)


def test_a_preempted_turn_is_interrupted_like_any_other() -> None:
    """B4: a preempted turn's partial output was committed as history; here it is what was said, and no more."""
    driver = FakeDriver(num_pages=8, max_context=32)
    answer, _ = driver.post(1, [1] * 6, start=True, max_tokens=26)
    driver.clock.now_s += 1
    late, _ = driver.post(2, [2] * 6, start=True, max_tokens=26)
    while not late.token_ids or driver.engine._sessions.find(2).table.pages:
        driver.steps(1)
    said = list(late.token_ids)
    new, _ = driver.post(2, [3], max_tokens=2, **INTERRUPT)
    driver.run()
    assert late.status.context_len == 6 + len(said)
    assert new.token_ids == expected_tokens([*[2] * 6, *said, 3], 2)
    assert answer.token_ids == expected_tokens([1] * 6, 26)


def test_an_empty_interrupt_just_stops_what_runs(driver: FakeDriver) -> None:
    answer, history = speak(driver, 5)
    num_passes = len(driver.runner.batches)
    stop = driver.turn(1, **INTERRUPT)
    assert answer.status.finish_reason == "interrupted"
    assert stop.status.finish_reason == "append"
    assert stop.status.context_len == len(history)
    assert len(driver.runner.batches) == num_passes
    assert driver.turn(1, [8], max_tokens=3).token_ids == expected_tokens([*history, 8], 3)


def test_other_sessions_do_not_notice(driver: FakeDriver) -> None:
    speak(driver, 3)
    others = {n: driver.post(n, [n], start=True, max_tokens=12)[0] for n in range(2, 6)}
    driver.steps(3)
    driver.post(1, [8], max_tokens=4, **INTERRUPT)
    driver.run()
    for n, other in others.items():
        assert other.token_ids == expected_tokens([n], 12)


# ---- with a rewind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewind_to", range(18))
def test_an_interrupt_cuts_anywhere_and_goes_on_as_if_nothing_had_stood_there(
    driver: FakeDriver, rewind_to: int
) -> None:
    """Before the turn, within its input, among its tokens, at the end and behind it, where it means the end."""
    history = [5, *driver.turn(1, [5], start=True, max_tokens=3).token_ids]
    answer, _ = driver.post(1, [6, 7, 8, 9], max_tokens=100)
    driver.steps(6)
    history += [6, 7, 8, 9, *answer.token_ids]
    assert len(history) == 14
    num_computed = driver.runner.num_tokens
    new, _ = driver.post(1, [10, 11], max_tokens=4, rewind_to=rewind_to, **INTERRUPT)
    driver.run()
    kept = history[:rewind_to]
    assert answer.status.finish_reason == "interrupted"
    assert answer.status.context_len == len(kept)
    assert new.token_ids == expected_tokens([*kept, 10, 11], 4)
    assert new.status.context_len == len(kept) + 6
    assert new.outputs[0].position == len(kept) + 2
    assert new.status.usage["cached_tokens"] == max(0, len(kept) - 1), "KV before the cut was lost"
    assert driver.runner.num_tokens - num_computed == len(kept) - max(0, len(kept) - 1) + 2 + 3


@pytest.mark.parametrize("rewind_to", [None, 0, 2, 3, 5, 8, 9, 100])
def test_it_is_the_same_for_an_answer_that_has_been_finished(driver: FakeDriver, rewind_to: int | None) -> None:
    """A client cannot know whether the answer that it talks over still runs."""
    values: dict[str, Any] = {**INTERRUPT, **({} if rewind_to is None else {"rewind_to": rewind_to})}
    results = []
    for max_tokens in (6, 100):
        answer, _ = driver.post(max_tokens, PROMPT, start=True, max_tokens=max_tokens)
        driver.steps(6)
        assert answer.is_done is (max_tokens == 6)
        new = driver.turn(max_tokens, [8], max_tokens=4, **values)
        results.append((new.token_ids, new.status.context_len, new.status.turn, dict(new.status.usage)))
    assert results[0] == results[1]


def test_pages_behind_the_cut_are_free_at_once(driver: FakeDriver) -> None:
    """B17-B20: tail pages leaked; lengths were not page-aligned."""
    speak(driver, 50)
    assert driver.pool.num_free == 128 - 13
    driver.post(1, rewind_to=6, **INTERRUPT)
    driver.steps(1)
    assert driver.pool.num_free == 128 - 2


# ---- turns that wait -----------------------------------------------------------------------------------------------


def test_turns_that_wait_are_appended_in_their_order_and_not_answered(driver: FakeDriver) -> None:
    answer, history = speak(driver, 4)
    waiting = [driver.post(1, [10 + n] * n, max_tokens=n)[0] for n in range(4)]  # the first of them a keep-alive
    driver.steps(1)
    history += [*answer.token_ids[4:], 11, 12, 12, 13, 13, 13]
    new, _ = driver.post(1, [8], max_tokens=3, **INTERRUPT)
    driver.run()
    for n, recorder in enumerate(waiting):
        assert recorder.token_ids == []
        assert recorder.status.finish_reason == "interrupted"
        assert recorder.status.usage["input_tokens"] == n
    assert [recorder.status.turn for recorder in (answer, *waiting, new)] == [0, 1, 1, 2, 3, 4]
    assert {recorder.status.context_len for recorder in (answer, *waiting)} == {len(history)}
    assert new.token_ids == expected_tokens([*history, 8], 3)


def test_all_that_were_ended_are_told_the_length_after_the_cut(driver: FakeDriver) -> None:
    answer, _ = speak(driver, 4)
    waiting, _ = driver.post(1, [9] * 5, max_tokens=3)
    new, _ = driver.post(1, [8], max_tokens=3, rewind_to=9, **INTERRUPT)
    driver.run()
    history = [*PROMPT, *answer.token_ids, 9, 9]
    assert [recorder.status.context_len for recorder in (answer, waiting)] == [9, 9]
    assert new.token_ids == expected_tokens([*history, 8], 3)


def test_a_waiting_turn_cuts_and_is_appended_where_it_wanted(driver: FakeDriver) -> None:
    answer, _ = speak(driver, 6)
    waiting, _ = driver.post(1, [9, 10], max_tokens=3, rewind_to=5)
    new, _ = driver.post(1, [8], max_tokens=3, **INTERRUPT)
    driver.run()
    history = [*PROMPT, *answer.token_ids[:2], 9, 10]
    assert answer.status.context_len == waiting.status.context_len == len(history)
    assert new.token_ids == expected_tokens([*history, 8], 3)
    assert new.status.usage["cached_tokens"] == 4


def test_a_waiting_turn_that_cannot_be_taken_in_is_told_so_and_the_others_are_appended() -> None:
    driver = FakeDriver(max_context=24)
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=20)
    driver.steps(4)
    too_long, _ = driver.post(1, [9] * 22)
    fits, _ = driver.post(1, [10] * 3)
    new, _ = driver.post(1, [8], max_tokens=3, **INTERRUPT)
    driver.run()
    assert too_long.code == "CONTEXT_FULL"
    assert answer.status.context_len == fits.status.context_len == 10
    assert new.token_ids == expected_tokens([*PROMPT, *answer.token_ids, 10, 10, 10, 8], 3)


# ---- interrupts that are refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "values", "expected"),
    [
        ([8] * 250, {}, "CONTEXT_FULL"),
        ([8] * 300, {}, "CONTEXT_FULL"),
        ([8], {"max_tokens": 250}, "CONTEXT_FULL"),
        ([], {"rewind_to": 0, "max_tokens": 1}, "INVALID_ARGUMENT"),
        ([VOCAB_SIZE], {}, "INVALID_ARGUMENT"),
        ([8], {"stop_token_ids": [VOCAB_SIZE]}, "INVALID_ARGUMENT"),
        ([8], {"turn": 3}, "FAILED_PRECONDITION"),
        ([8], {"turn": 5}, "FAILED_PRECONDITION"),
        ([8], {"session_key": "wrong"}, "PERMISSION_DENIED"),
        ([8], {"session_key": None}, "PERMISSION_DENIED"),
    ],
)
def test_a_refused_interrupt_ends_nobody_and_changes_nothing(
    driver: FakeDriver, given: list[int], values: dict[str, Any], expected: str
) -> None:
    """B1: rejecting a turn cleared the session's busy mark. The one that runs and those that wait go on untouched."""
    key = {"session_key": "ours"}
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=20, **key)
    driver.steps(6)
    first, _ = driver.post(1, [9, 9], max_tokens=3, rewind_to=7, **key)
    unfit, _ = driver.post(1, [9] * 250, **key)
    second, _ = driver.post(1, EmbedInput(torch.ones(2, HIDDEN_SIZE)), max_tokens=3, **key)
    asked = {name: value for name, value in {**key, **INTERRUPT, **values}.items() if value is not None}
    num_passes = len(driver.runner.batches)
    refused, _ = driver.post(1, given, **asked)
    driver.steps(1)
    assert refused.code == expected
    assert len(driver.runner.batches) == num_passes + 1, "a rejected turn cost a forward pass"
    driver.run()
    assert answer.token_ids == expected_tokens(PROMPT, 20)
    assert answer.status.finish_reason == "length"
    history = [*PROMPT, *answer.token_ids[:4], 9, 9]
    assert first.token_ids == expected_tokens(history, 3)
    assert unfit.code == "CONTEXT_FULL"
    history += [*first.token_ids, *torch.ones(2, HIDDEN_SIZE)]
    assert second.token_ids == expected_tokens(history, 3)
    assert [recorder.status.turn for recorder in (answer, first, second)] == [0, 1, 2]


def test_a_refused_interrupt_leaves_the_text_of_the_answer_alone() -> None:
    """The state of the text is part of what a refusal must not touch."""

    class CountingCodec:
        """Says of each token how many came before it, since generation was begun."""

        state = num_held = 0

        def __getattr__(self, name: str) -> Any:
            return {"append_other": lambda **_: [], "begin_generation": lambda *_, **_named: None}[name]

        def accept(self, token_id: int) -> Any:
            self.state += 1
            return type("Piece", (), {"text": str(self.state), "stop": None})

        def end_generation(self) -> str:
            self.state = 0
            return "."

    driver = FakeDriver(max_context=64, new_codec=lambda _: CountingCodec())
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=6)
    driver.steps(3)
    assert driver.turn(1, [8] * 62, **INTERRUPT).code == "CONTEXT_FULL"
    assert answer.text == "123456."


# ---- interrupts that do not end well -------------------------------------------------------------------------------


def interrupt_and_wait(driver: FakeDriver) -> tuple[list[Recorder], Recorder, Turn]:
    """An interrupt that cuts at 6, of a turn that runs and one that waits; it has said a token itself."""
    answer, _ = speak(driver, 6)
    waiting, _ = driver.post(1, [9], max_tokens=3)
    new, turn = driver.post(1, [8], max_tokens=30, rewind_to=6, **INTERRUPT)
    driver.steps(1)
    assert len(new.token_ids) == 1
    return [answer, waiting], new, turn


def check_only_the_cut_stays(driver: FakeDriver, ended: list[Recorder]) -> None:
    kept = [*PROMPT, *ended[0].token_ids[:3]]
    assert [recorder.status.context_len for recorder in ended] == [6, 6]
    assert context_len(driver) == 6
    later = driver.turn(1, [10], max_tokens=4)
    assert later.token_ids == expected_tokens([*kept, 10], 4)
    assert later.status.turn == 2, "the number of the turn that was undone is free again"
    assert later.status.usage["cached_tokens"] == 5


def test_an_interrupt_whose_pass_fails_is_undone_but_for_its_cut(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that it ended have been told of the cut: it cannot be taken back."""
    ended, new, _ = interrupt_and_wait(driver)
    driver.runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.CRITICAL):
        driver.run()
    assert new.code == "INTERNAL"
    check_only_the_cut_stays(driver, ended)


def test_an_interrupt_whose_client_leaves_is_undone_but_for_its_cut(driver: FakeDriver) -> None:
    """B12: context lost, or the abandoned partial turn committed, when a client left and came back at once."""
    ended, new, turn = interrupt_and_wait(driver)
    driver.engine.cancel(turn)
    driver.run()
    assert new.status.finish_reason == "cancelled"
    assert new.status.context_len == 6
    check_only_the_cut_stays(driver, ended)


# ---- who interrupts ------------------------------------------------------------------------------------------------


def test_a_sessions_default_interrupts_with_turns_that_say_something(driver: FakeDriver) -> None:
    answer, history = speak(driver, 4, **INTERRUPT)
    new = driver.turn(1, [8], max_tokens=2)
    assert answer.status.finish_reason == "interrupted"
    assert new.token_ids == expected_tokens([*history, 8], 2)


@pytest.mark.parametrize("empty", [[], TextInput("")])
def test_a_sessions_default_does_not_make_a_keep_alive_interrupt(driver: FakeDriver, empty: Any) -> None:
    answer, _ = speak(driver, 4, **INTERRUPT)
    kept, _ = driver.post(1, empty)
    driver.steps(1)
    assert not kept.is_done
    driver.run()
    assert answer.token_ids == expected_tokens(PROMPT, 100)
    assert kept.status.context_len == 103


def test_a_sessions_default_does_not_make_a_mere_end_interrupt(driver: FakeDriver) -> None:
    answer, _ = speak(driver, 4, **INTERRUPT)
    closing, _ = driver.post(1, end=True)
    driver.run()
    assert answer.status.finish_reason == "length"
    assert closing.status.finish_reason == "closed"


def test_a_turn_of_such_a_session_may_wait_all_the_same(driver: FakeDriver) -> None:
    answer, _ = speak(driver, 4, **INTERRUPT)
    driver.post(1, [8], max_tokens=2, on_overlap="queue")
    driver.run()
    assert answer.status.finish_reason == "length"


# ---- END -----------------------------------------------------------------------------------------------------------


def test_an_end_that_interrupts_closes_at_once(driver: FakeDriver) -> None:
    """B15: a close during decode."""
    answer, _ = speak(driver, 4)
    waiting, _ = driver.post(1, [9], max_tokens=3)
    closing, _ = driver.post(1, end=True, **INTERRUPT)
    driver.steps(1)
    assert answer.status.finish_reason == waiting.status.finish_reason == "interrupted"
    assert closing.status.finish_reason == "closed"
    assert driver.pool.num_free == 128
    assert driver.turn(1).code == "NOT_FOUND"


def test_a_last_turn_may_interrupt_and_is_answered(driver: FakeDriver) -> None:
    answer, history = speak(driver, 4)
    last = driver.turn(1, [8], end=True, max_tokens=3, **INTERRUPT)
    assert answer.status.finish_reason == "interrupted"
    assert last.token_ids == expected_tokens([*history, 8], 3)
    assert driver.pool.num_free == 128


def test_a_second_end_that_interrupts_makes_a_closing_session_close_at_once(driver: FakeDriver) -> None:
    """B15: double close. It is refused, since the session closes already; it need not wait for that all the same."""
    answer, _ = speak(driver, 4)
    first, _ = driver.post(1, end=True)
    driver.steps(1)
    second, _ = driver.post(1, end=True, **INTERRUPT)
    driver.steps(1)
    assert second.code == "FAILED_PRECONDITION"
    assert answer.status.finish_reason == first.status.finish_reason == "interrupted"
    assert driver.pool.num_free == 128
    assert driver.turn(1).code == "NOT_FOUND"


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("given", [[VOCAB_SIZE], [8] * 300, [8] * 250])
def test_an_end_that_interrupts_closes_at_once_even_when_it_is_refused(
    driver: FakeDriver, given: list[int], is_default: bool
) -> None:
    answer, _ = speak(driver, 4, **(INTERRUPT if is_default else {}))
    refused, _ = driver.post(1, given, end=True, **({} if is_default else INTERRUPT))
    driver.steps(1)
    assert refused.error is not None
    assert answer.status.finish_reason == "interrupted"
    assert answer.status.context_len == 7
    assert driver.pool.num_free == 128
    assert driver.turn(1).code == "NOT_FOUND"


def test_turns_behind_an_end_are_not_let_in_by_an_interrupt(driver: FakeDriver) -> None:
    answer, _ = speak(driver, 4)
    closing, _ = driver.post(1, end=True)
    late, _ = driver.post(1, [8], **INTERRUPT)
    driver.run()
    assert late.code == "FAILED_PRECONDITION"
    assert answer.status.finish_reason == "length"
    assert closing.status.finish_reason == "closed"
