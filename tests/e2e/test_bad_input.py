"""Whatever is wrong with a turn: it gets its code, nothing else changes, and the session goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from support.oracle import stock_greedy
from support.raw import RawStream, ids

PROMPT = list(range(4000, 4020))
OPTIONS = {"max_tokens": 2, "ignore_eos": True}

BAD_TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "two inputs at once": ("INVALID_ARGUMENT", {"input_ids": ids(5), "text_input": b"hello"}),
    "an id beyond the vocabulary": ("INVALID_ARGUMENT", {"input_ids": ids(5, 49152)}),
    "a negative id": ("INVALID_ARGUMENT", {"input_ids": ids(-1)}),
    "embeddings of a wrong width": ("INVALID_ARGUMENT", {"input_embeds": np.zeros((1, 3, 100), np.float32)}),
    "embeddings that are not finite": ("INVALID_ARGUMENT", {"input_embeds": np.full((1, 1, 576), np.nan, np.float32)}),
    "a max_tokens that is no number": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"max_tokens": "two"}}),
    "a negative max_tokens": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"max_tokens": -1}}),
    "a temperature that is no number": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"temperature": "hot"}}),
    "a temperature of NaN": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"temperature": "nan"}}),
    "a negative temperature": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"temperature": -0.5}}),
    "a top_p above 1": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"top_p": 1.5}}),
    "stop that is no list": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"stop": "END"}}),
    "an unknown role": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"role": "boss"}}),
    "an unknown option": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"max_token": 3}}),
    "an option of START": ("INVALID_ARGUMENT", {"input_ids": ids(5), "options": {"idle_timeout_s": 3}}),
    "text of 10 MB": ("CONTEXT_FULL", {"text_input": b"word " * 2_000_000}),
    "invalid UTF-8": ("INVALID_ARGUMENT", {"text_input": b"caf\xe9 \xff"}),
    "a turn longer than the context": ("CONTEXT_FULL", {"input_ids": ids(*[5] * 8192)}),
    "max_tokens beyond the context": ("CONTEXT_FULL", {"input_ids": ids(5), "options": {"max_tokens": 8192}}),
}


@pytest.fixture(scope="module")
def expected(smollm2: PreTrainedModel) -> list[int]:
    return stock_greedy(smollm2, PROMPT, 4)


@pytest.mark.parametrize(("code", "turn"), BAD_TURNS.values(), ids=BAD_TURNS.keys())
def test_a_bad_turn_gets_its_code_and_the_session_goes_on(
    raw: RawStream, expected: list[int], code: str, turn: dict[str, Any]
) -> None:
    session_id = f"bad-{id(turn)}"
    first = raw.ask(session_id, start=True, input_ids=ids(*PROMPT), options=OPTIONS)
    answer = raw.ask(session_id, **turn)
    assert answer.code == code, answer.error
    assert answer.token_ids == []
    after = raw.ask(session_id, input_ids=ids(), options=OPTIONS)
    assert first.token_ids + after.token_ids == expected
    assert after.status is not None
    assert after.status["context_len"] == len(PROMPT) + 4
    assert raw.ask(session_id, end=True, input_ids=ids()).status["finish_reason"] == "closed"


def test_an_unknown_option_names_the_nearest_known_one(raw: RawStream) -> None:
    answer = raw.ask("nearest", start=True, input_ids=ids(5), options={"temprature": 1})
    assert answer.error is not None
    assert "did you mean 'temperature'?" in answer.error
    raw.ask("nearest", end=True, input_ids=ids())


def test_a_turn_without_start_is_refused_in_tritons_words(raw: RawStream) -> None:
    answer = raw.ask("never-opened", input_ids=ids(5))
    assert "must specify the START flag" in (answer.error or "")


def test_end_of_an_unknown_id_is_refused(raw: RawStream) -> None:
    answer = raw.ask("never-opened-either", end=True, input_ids=ids())
    assert "must specify the START flag" in (answer.error or "")


def test_a_refused_start_opens_nothing_and_the_id_may_be_tried_again(raw: RawStream, expected: list[int]) -> None:
    assert raw.ask("again", start=True, input_ids=ids(5), options={"max_tokens": -1}).code == "INVALID_ARGUMENT"
    assert "must specify the START flag" in (raw.ask("again", input_ids=ids(5)).error or "")
    answer = raw.ask("again", start=True, input_ids=ids(*PROMPT), options={"max_tokens": 4, "ignore_eos": True})
    assert answer.token_ids == expected
    assert raw.ask("again", end=True, input_ids=ids()).code is None


def test_end_closes_the_session_even_when_its_turn_is_refused(raw: RawStream) -> None:
    raw.ask("closing", start=True, input_ids=ids(5), options=OPTIONS)
    assert raw.ask("closing", end=True, input_ids=ids(-1)).code == "INVALID_ARGUMENT"
    assert "START" in (raw.ask("closing", input_ids=ids(5)).error or "")


def test_nothing_to_generate_from_is_refused(raw: RawStream) -> None:
    answer = raw.ask("empty", start=True, input_ids=ids(), options={"max_tokens": 3})
    assert answer.code == "INVALID_ARGUMENT"
    raw.ask("empty", end=True, input_ids=ids())


def test_a_bystander_is_not_disturbed(raw: RawStream, expected: list[int]) -> None:
    raw.ask("bystander", start=True, input_ids=ids(*PROMPT), options={"max_tokens": 0})
    raw.ask("bad", start=True, input_ids=ids(5), options=OPTIONS)
    for code, turn in BAD_TURNS.values():
        answer = raw.ask("bad", **turn)
        assert answer.code == code
    answer = raw.ask("bystander", input_ids=ids(), options={"max_tokens": 4, "ignore_eos": True})
    assert answer.token_ids == expected
    raw.ask("bystander", end=True, input_ids=ids())


def test_a_negative_session_id_is_refused(raw: RawStream) -> None:
    """It arrives as what it would be without its sign, and was a session like any other."""
    assert raw.ask(-5, start=True, input_ids=ids(5), options=OPTIONS).code == "INVALID_ARGUMENT"
    raw.ask(-5, end=True, input_ids=ids())


def test_triton_cuts_a_session_id_at_nul(raw: RawStream) -> None:
    """The contract says so, since nothing on the server can tell the two ids from each other."""
    raw.ask("n\0a", start=True, input_ids=ids(*PROMPT), options=OPTIONS)
    answer = raw.ask("n\0b", end=True, input_ids=ids())
    assert answer.status is not None
    assert answer.status["finish_reason"] == "closed"
