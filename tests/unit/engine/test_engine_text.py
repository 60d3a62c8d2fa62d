"""Tests of engine: when it calls the codec, and what it rolls back there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.sessions.inputs import TextInput
from microturn.text.codec import Piece
from support.driver import Recorder
from support.fake_runner import VOCAB_SIZE, FakeDriver, expected_tokens

# Every printable character is a token, and every role an id behind them.
_FIRST = ord(" ")


def ids_of(text: str) -> list[int]:
    return [ord(character) - _FIRST for character in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(_FIRST + token_id) for token_id in ids)


@dataclass(frozen=True)
class State:
    """What the codec remembers: text without ids, and output that may begin a stop string."""

    held: str = ""
    stop: tuple[str, ...] = ()
    withheld: str = ""


class WordCodec:
    """Holds the last word until a space or a flush; withholds what may become a stop string."""

    def __init__(self) -> None:
        self.state = State()
        self.roles: list[str | None] = []

    @property
    def num_held(self) -> int:
        return len(self.state.held)

    def least_num_ids(self, text: str, enough: int) -> int:
        return len(self.state.held + text) // 2

    def append_text(self, text: str, *, role: str | None, flush: bool, **_: Any) -> list[int]:
        if "!" in text:
            raise InvalidArgument("no shouting")
        self.roles.append(role)
        text = self.state.held + text
        end = len(text) if flush else text.rfind(" ") + 1
        self.state = replace(self.state, held=text[end:])
        return ids_of(text[:end])

    def append_other(self, *, role: str | None, **_: Any) -> list[int]:
        self.roles.append(role)
        held, self.state = self.state.held, replace(self.state, held="")
        return ids_of(held)

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None:
        self.state = replace(self.state, stop=tuple(stop))

    def accept(self, token_id: int) -> Piece:
        text = self.state.withheld + text_of([token_id])
        stop = next((stop for stop in self.state.stop if stop in text), None)
        if stop is not None:
            self.state = replace(self.state, withheld="")
            return Piece(text[: text.index(stop)], stop)
        num_withheld = min(len(text), max(map(len, self.state.stop), default=1) - 1)
        at = len(text) - num_withheld
        self.state = replace(self.state, withheld=text[at:])
        return Piece(text[:at])

    def end_generation(self) -> str:
        withheld, self.state = self.state.withheld, replace(self.state, withheld="")
        return withheld


@pytest.fixture
def codecs() -> list[WordCodec]:
    """The codecs that sessions were given, in their order."""
    return []


@pytest.fixture
def driver(codecs: list[WordCodec]) -> FakeDriver:
    def new_codec(tools: object) -> WordCodec:
        if tools:
            raise InvalidArgument("this model knows no tools")
        codecs.append(WordCodec())
        return codecs[-1]

    return FakeDriver(max_context=64, new_codec=new_codec)


def appended(recorder: Recorder) -> str:
    """The text whose ids a turn appended."""
    ids = recorder.outputs[-1].appended_ids
    assert ids is not None
    return text_of(ids)


def say(driver: FakeDriver, text: str, **values: Any) -> Recorder:
    return driver.turn(1, TextInput(text), return_appended_ids=True, **values)


# ---- input ---------------------------------------------------------------------------------------------------------


def test_text_that_may_still_change_is_held_until_it_is_certain(driver: FakeDriver) -> None:
    assert appended(say(driver, "so the fi", start=True, max_tokens=0)) == "so the "
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_a_turn_that_generates_has_all_text_before_it(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    answer = say(driver, "rst", max_tokens=3)
    assert appended(answer) == "first"
    assert answer.token_ids == expected_tokens(ids_of("so the first"), 3)
    assert answer.text == text_of(answer.token_ids)


@pytest.mark.parametrize("keep_alive", [TextInput(""), ()])
def test_a_keep_alive_leaves_held_text_held(driver: FakeDriver, keep_alive: Any) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    answer = driver.turn(1, keep_alive, return_appended_ids=True)
    assert appended(answer) == ""
    assert answer.status.context_len == 7
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_generating_without_input_appends_what_was_held(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    answer = driver.turn(1, max_tokens=2, return_appended_ids=True)
    assert appended(answer) == "fi"
    assert answer.token_ids == expected_tokens(ids_of("so the fi"), 2)


def test_held_text_comes_before_ids(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    answer = driver.turn(1, [50, 51], max_tokens=1, return_appended_ids=True)
    assert answer.outputs[-1].appended_ids == (*ids_of("fi"), 50, 51)
    assert answer.status.usage["input_tokens"] == 4


def test_text_that_is_all_held_opens_a_session_all_the_same(driver: FakeDriver) -> None:
    assert say(driver, "so", start=True, max_tokens=0).status.context_len == 0
    assert say(driver, "", max_tokens=1).token_ids == expected_tokens(ids_of("so"), 1)


def test_a_role_holds_for_its_turn_only(driver: FakeDriver, codecs: list[WordCodec]) -> None:
    """START's `role` and `traceparent` say what that turn is; the session's later turns are not the same."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    say(driver, "a ", start=True, max_tokens=0, role="system", traceparent=trace)
    _, turn = driver.post(1, TextInput("b "), max_tokens=0)
    driver.run()
    say(driver, "c ", max_tokens=0, role="user")
    assert codecs[0].roles == ["system", None, "user"]
    assert turn.options.traceparent is None


def test_an_empty_turn_with_a_role_opens_its_message_and_waits_for_its_text(
    driver: FakeDriver, codecs: list[WordCodec]
) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    assert appended(driver.turn(1, role="user", return_appended_ids=True)) == ""
    assert codecs[0].roles[-1] == "user"
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_what_the_codec_refuses_is_refused(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    assert str(say(driver, "rst!").error) == "INVALID_ARGUMENT: no shouting"
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "
    refused = driver.turn(2, start=True, tools='[{"name": "clock"}]')
    assert str(refused.error) == "INVALID_ARGUMENT: this model knows no tools"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(driver: FakeDriver, codecs: list[WordCodec]) -> None:
    """Tokenizing 10 MB of text took seconds, in which nobody else was served."""
    say(driver, "so the fi", start=True, max_tokens=0)
    refused = say(driver, "x" * 1000)
    assert refused.error is not None
    assert refused.error.code == "CONTEXT_FULL"
    assert codecs[0].roles == [None], "the codec was asked"
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


# ---- counting ------------------------------------------------------------------------------------------------------


def count(driver: FakeDriver, given: Any, **values: Any) -> int:
    answer = driver.turn(1, given, count_only=True, **values)
    assert answer.token_ids == []
    assert answer.status.finish_reason == "append"
    assert answer.status.usage["computed_tokens"] == 0
    return answer.status.usage["input_tokens"]


def test_counting_says_what_would_be_appended_and_appends_nothing(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    assert count(driver, TextInput("rst thing I")) == len("first thing I")
    assert count(driver, TextInput("rst"), max_tokens=5) == len("first")
    assert count(driver, [50, 51]) == len("fi") + 2
    assert count(driver, ()) == 0
    answer = say(driver, "rst", max_tokens=3)
    assert appended(answer) == "first"
    assert answer.token_ids == expected_tokens(ids_of("so the first"), 3)
    assert answer.status.turn == 1, "a count has taken a number"


def test_a_session_of_one_turn_counts(driver: FakeDriver) -> None:
    answer = driver.turn(7, TextInput("so the first"), start=True, end=True, count_only=True, return_appended_ids=True)
    assert answer.status.usage["input_tokens"] == 12
    assert appended(answer) == "so the first"
    assert driver.turn(7, [50]).code == "NOT_FOUND"


def test_a_count_waits_for_the_answer_before_it_and_ends_none(driver: FakeDriver) -> None:
    say(driver, "so", start=True, max_tokens=0, on_overlap="interrupt")
    running, _ = driver.post(1, TextInput(" a"), max_tokens=6, on_overlap="queue")
    driver.steps(2)
    counting, _ = driver.post(1, TextInput("four"), count_only=True)
    driver.run()
    assert len(running.token_ids) == 6
    assert counting.status.usage["input_tokens"] == 4
    assert counting.status.context_len == running.status.context_len


def test_a_count_that_waits_where_an_interrupt_comes_has_counted(driver: FakeDriver) -> None:
    say(driver, "so", start=True, max_tokens=0)
    running, _ = driver.post(1, TextInput(" a"), max_tokens=50)
    driver.steps(3)
    counting, _ = driver.post(1, TextInput("four"), count_only=True)
    interrupt, _ = driver.post(1, TextInput(" b"), max_tokens=0, on_overlap="interrupt", return_appended_ids=True)
    driver.run()
    assert running.status.finish_reason == "interrupted"
    assert counting.status.usage["input_tokens"] == 4
    assert counting.status.context_len == running.status.context_len == 4 + len(running.token_ids)
    assert appended(interrupt) + appended(say(driver, " c", max_tokens=1)) == " b c"


def test_a_numbered_count_is_done_once(driver: FakeDriver) -> None:
    say(driver, "so ", start=True, max_tokens=0, turn=0)
    assert count(driver, TextInput("a b"), turn=1) == 3
    again = driver.turn(1, TextInput("a b"), count_only=True, turn=1)
    assert again.status.replayed
    assert again.status.usage["input_tokens"] == 3
    assert appended(say(driver, "c", max_tokens=1, turn=2)) == "c"


def test_what_is_too_long_to_be_appended_is_not_counted(driver: FakeDriver) -> None:
    say(driver, "so ", start=True, max_tokens=0)
    assert driver.turn(1, TextInput("x" * 1000), count_only=True).code == "CONTEXT_FULL"
    refused = driver.turn(1, TextInput("x"), count_only=True, rewind_to=0)
    assert str(refused.error) == "INVALID_ARGUMENT: count_only changes nothing: leave rewind_to out"


# ---- output --------------------------------------------------------------------------------------------------------


def answer_text(prompt: str, num_tokens: int) -> str:
    return text_of(expected_tokens(ids_of(prompt), num_tokens))


def test_a_stop_string_ends_the_answer_and_stays_out_of_the_text(driver: FakeDriver) -> None:
    full = answer_text("go", 12)
    answer = say(driver, "go", start=True, max_tokens=12, stop=[full[4:6], "never"])
    assert answer.text == full[:4]
    assert len(answer.token_ids) == 6, "its tokens stay in the context"
    assert answer.status.finish_reason == "stop"
    assert answer.status.stop_reason == full[4:6]
    assert answer.status.context_len == 8


def test_what_only_might_have_been_a_stop_string_comes_at_the_end(driver: FakeDriver) -> None:
    full = answer_text("go", 6)
    answer = say(driver, "go", start=True, max_tokens=6, stop=[full[4:6] + "#####"])
    assert answer.text == full
    assert answer.status.finish_reason == "length"


def test_a_stop_string_does_not_count_before_min_tokens(driver: FakeDriver) -> None:
    full = answer_text("go", 12)
    answer = say(driver, "go", start=True, max_tokens=12, min_tokens=4, stop=[full[2], full[8]])
    assert answer.status.stop_reason == full[8]
    assert len(answer.token_ids) == 9


def test_stop_strings_hold_for_their_turn_only(driver: FakeDriver) -> None:
    full = answer_text("go", 8)
    say(driver, "go", start=True, max_tokens=4, stop=["never"])
    driver.turn(1, max_tokens=1, stop=[full[6]])
    assert driver.turn(1, max_tokens=3).text == full[5:8]


# ---- roll-back -----------------------------------------------------------------------------------------------------


def test_a_cancelled_turn_gives_the_held_text_back(driver: FakeDriver) -> None:
    """B12: the client's text and the server's were no longer the same after a disconnect."""
    say(driver, "so the fi", start=True, max_tokens=0)
    _, turn = driver.post(1, TextInput("ve"), max_tokens=20)
    driver.engine.step()
    driver.engine.cancel(turn)
    driver.run()
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_a_refused_turn_gives_the_held_text_back(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    refused = say(driver, "x" * 80, max_tokens=2)
    assert refused.error is not None
    assert refused.error.code == "CONTEXT_FULL"
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_a_failed_forward_pass_gives_the_held_text_back(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    driver.runner.error = RuntimeError("out of memory")
    assert say(driver, "ve", max_tokens=2).error is not None
    assert appended(say(driver, "rst ", max_tokens=0)) == "first "


def test_a_session_that_begins_anew_has_no_text_of_the_old_one(driver: FakeDriver) -> None:
    say(driver, "so the fi", start=True, max_tokens=0)
    assert appended(say(driver, "rst ", start=True, max_tokens=0)) == "rst "


def test_every_token_has_a_character() -> None:
    """What the tests above rely on."""
    assert ids_of(text_of(range(VOCAB_SIZE))) == list(range(VOCAB_SIZE))
