"""Tests of engine: answers that must match a grammar, whatever happens to their session meanwhile."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
import torch

from microturn.sessions.inputs import EmbedInput
from microturn.text import grammar
from microturn.text.codec import Piece
from microturn.text.detokenizer import Detokenizer, OutputState
from microturn.text.grammar_source import GrammarSource
from microturn.text.vocabulary import Vocabulary
from support.by_hand import AllByHand
from support.driver import IdsOnly, Recorder
from support.fake_runner import HIDDEN_SIZE, FakeDriver, expected_tokens
from support.grammars import FAKE_ENDS, fake_encode, fake_grammars, fake_text, plain_value

PROMPT = fake_encode("Say a date: ")
DATE = "[0-9]{4}-[01][0-9]-[0-3][0-9]"
LIST = json.dumps({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 3})
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
# Answers of a grammar in several manners; each ends by itself.
MANNERS: dict[str, dict[str, Any]] = {
    "greedy": {"regex": DATE},
    "sampled": {"regex": DATE, **SAMPLED},
    "penalized": {"regex": "[a-e]{30}", "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "filtered": {"json_schema": LIST, "top_k": 5, "top_p": 0.9, "logprobs": True, **SAMPLED},
    "biased": {"regex": "[a-e]{12}", "logit_bias": json.dumps({fake_encode("c")[0]: 3.0}), **SAMPLED},
    "ended by the model": {"regex": "[a-z]*", **SAMPLED},
    "not ended by the model": {"regex": "[a-z]{0,20}", "ignore_eos": True, **SAMPLED},
}


def driver_of(*, is_asynchronous: bool = False, **kwargs: Any) -> FakeDriver:
    settings = {"max_context": 256, "eos_ids": frozenset(FAKE_ENDS), "grammars": fake_grammars(), **kwargs}
    return FakeDriver(is_asynchronous=is_asynchronous, **settings)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def driver(request: pytest.FixtureRequest) -> FakeDriver:
    return driver_of(is_asynchronous=request.param)


def plain(options: dict[str, Any], history: list[int], max_tokens: int, so_far: int = 0) -> list[int]:
    said = {name: value for name, value in options.items() if name not in ("regex", "json_schema", "logprobs")}
    if "logit_bias" in said:
        said["logit_bias"] = tuple((int(token), bias) for token, bias in json.loads(said["logit_bias"]).items())
    source = next(GrammarSource(kind, options[kind]) for kind in ("regex", "json_schema") if kind in options)
    return plain_value(source, history, max_tokens, so_far=so_far, **said)


# ---- what is answered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manner", MANNERS)
def test_an_answer_is_the_plain_one_under_the_same_masks(driver: FakeDriver, manner: str) -> None:
    answer = driver.turn(1, PROMPT, start=True, max_tokens=100, **MANNERS[manner])
    assert answer.token_ids == plain(MANNERS[manner], PROMPT, 100)
    assert answer.status.finish_reason == "complete"
    if "regex" in MANNERS[manner]:
        assert re.fullmatch(MANNERS[manner]["regex"], fake_text(answer.token_ids))


def test_answers_under_grammars_leave_those_beside_them_alone() -> None:
    alone = driver_of()
    expected = {
        name: alone.turn(name, PROMPT, start=True, max_tokens=100, **of).token_ids for name, of in MANNERS.items()
    }
    for is_asynchronous in (False, True):
        driver = driver_of(is_asynchronous=is_asynchronous, max_batch_tokens=8)
        answers: dict[str, Recorder] = {}
        for number, (name, options) in enumerate(MANNERS.items()):
            answers[name], _ = driver.post(name, PROMPT, start=True, max_tokens=100, **options)
            answers[f"free {name}"], _ = driver.post(-number, [number], start=True, max_tokens=40, ignore_eos=True)
        driver.run()
        assert {name: answers[name].token_ids for name in expected} == expected
        for number, name in enumerate(MANNERS):
            assert answers[f"free {name}"].token_ids == expected_tokens([number], 40)


def test_the_engine_runs_ahead_of_answers_under_grammars_too() -> None:
    driver = driver_of(is_asynchronous=True)
    driver.turn(1, PROMPT, start=True, max_tokens=100, regex=DATE)
    ahead = [batch for batch in driver.runner.batches if batch.ids is not None]
    assert len(ahead) == len("2026-11-23"), "each pass but the first, and one whose row is dropped"


def test_log_probabilities_are_the_models_own(driver: FakeDriver) -> None:
    answer = driver.turn(1, PROMPT, start=True, max_tokens=1, choice='["~"]', logprobs=True)
    free = driver.turn(
        2, PROMPT, start=True, max_tokens=1, logit_bias=json.dumps({fake_encode("~")[0]: 100}), logprobs=True
    )
    assert answer.token_ids == free.token_ids == fake_encode("~")
    assert answer.outputs[0].logprobs == free.outputs[0].logprobs


# ---- how it ends ---------------------------------------------------------------------------------------------------


def test_a_whole_value_ends_the_turn_and_says_so(driver: FakeDriver) -> None:
    status = driver.turn(1, PROMPT, start=True, max_tokens=10, regex=DATE).status
    assert (status.finish_reason, status.stop_reason) == ("complete", None)
    assert driver.turn(1, PROMPT, max_tokens=9, regex=DATE).status.finish_reason == "length"


def test_an_end_that_the_grammar_allows_ends_it_too(driver: FakeDriver) -> None:
    bias = json.dumps({FAKE_ENDS[1]: 100})
    answer = driver.turn(1, PROMPT, start=True, max_tokens=10, regex="[a-z]{3,}", logit_bias=bias)
    assert answer.token_ids[-1] == FAKE_ENDS[1]
    assert len(answer.token_ids) == 4
    assert (answer.status.finish_reason, answer.status.stop_reason) == ("complete", FAKE_ENDS[1])


def test_a_stop_that_leaves_the_value_short_is_no_complete_one(driver: FakeDriver) -> None:
    dash = fake_encode("-")[0]
    answer = driver.turn(1, PROMPT, start=True, max_tokens=10, regex=DATE, stop_token_ids=json.dumps([dash]))
    assert answer.token_ids[-1] == dash
    assert (answer.status.finish_reason, answer.status.stop_reason) == ("stop", dash)


def test_no_end_comes_before_min_tokens_unless_nothing_else_is_left(driver: FakeDriver) -> None:
    bias = json.dumps({FAKE_ENDS[0]: 100})
    answer = driver.turn(1, PROMPT, start=True, max_tokens=30, regex="[a-z]*", logit_bias=bias, min_tokens=12)
    assert len(answer.token_ids) == 13
    answer = driver.turn(1, PROMPT, max_tokens=30, regex=DATE, min_tokens=20)
    assert answer.status.finish_reason == "complete"
    stop = json.dumps(fake_encode("0123456789"))
    answer = driver.turn(1, PROMPT, max_tokens=30, regex=DATE, min_tokens=20, stop_token_ids=stop)
    assert answer.status.finish_reason == "complete", "digits are banned, and the grammar allows nothing else"


def test_a_turn_that_only_appends_has_no_value(driver: FakeDriver) -> None:
    answer = driver.turn(1, PROMPT, start=True, max_tokens=0, regex=DATE)
    assert answer.status.finish_reason == "append"


# ---- a grammar is of one turn --------------------------------------------------------------------------------------


def test_each_turn_has_its_own_grammar_or_none(driver: FakeDriver) -> None:
    history: list[int] = []
    for number, regex in enumerate([DATE, "[a-f]{5}", None, DATE]):
        history += PROMPT
        if regex is None:
            answer = driver.turn(1, PROMPT, max_tokens=7, ignore_eos=True)
            expected = expected_tokens(history, 7)
        else:
            answer = driver.turn(1, PROMPT, start=number == 0, max_tokens=30, regex=regex)
            expected = plain({"regex": regex}, history, 30)
        assert answer.token_ids == expected
        history += answer.token_ids


def test_a_long_text_with_a_bound_is_whole_and_one_that_is_too_long_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used up the states of its lexer: the turn was undone, and the schema refused to everybody from then on."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 100)
    monkeypatch.setattr(grammar, "MAX_OWN_LEXER_STATES", 400)
    driver = driver_of(max_context=1000, num_pages=512)
    long, too_long = (json.dumps({"type": "string", "minLength": size, "maxLength": size}) for size in (250, 600))
    answer = driver.turn(1, PROMPT, start=True, max_tokens=800, json_schema=long)
    assert answer.status.finish_reason == "complete"
    assert len(json.loads(fake_text(answer.token_ids))) == 250
    refused = driver.turn(2, PROMPT, start=True, max_tokens=800, json_schema=too_long)
    assert refused.code == "INVALID_ARGUMENT"
    assert "too long" in str(refused.error)
    for schema in (long, too_long):
        assert driver.turn(3, PROMPT, start=True, max_tokens=5, json_schema=schema).status.finish_reason == "length"


class HalfCodec(IdsOnly):
    """Text as a model has it, whose token for `~` is the beginning of a character."""

    has_byte_fallback = False

    def __init__(self) -> None:
        self.state = OutputState()
        self._detokenizer = Detokenizer(cast("Vocabulary", self))

    def text_bytes(self, token_id: int) -> bytes:
        return fake_text([token_id]).encode().replace(b"~", b"\xe4\xbd")

    first_text_bytes = text_bytes

    def drop_half_character(self) -> None:
        self.state = self._detokenizer.drop_half_character(self.state)

    def accept(self, token_id: int) -> Piece:
        piece, self.state = self._detokenizer.accept(self.state, token_id)
        return piece


def test_a_value_does_not_begin_with_half_a_character_of_the_answer_before_it() -> None:
    """What was left of it came first as U+FFFD: the answer was no value, and ended as `complete` all the same."""
    driver = driver_of(new_codec=lambda _: HalfCodec())
    half = {"max_tokens": 1, "logit_bias": json.dumps({fake_encode("~")[0]: 100})}
    assert driver.turn(1, PROMPT, start=True, **half).text == ""
    answer = driver.turn(1, max_tokens=30, regex=DATE)
    assert re.fullmatch(DATE, answer.text)
    assert driver.turn(1, PROMPT, **half).text == ""
    free = driver.turn(1, max_tokens=1, logit_bias=json.dumps({fake_encode("a")[0]: 100}))
    assert free.text.startswith("\ufffd"), "without a value the character goes on, and what follows is no part of it"


# ---- a value goes on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"json_schema": LIST}, {"json_schema": LIST, **SAMPLED}], ids=["greedy", "sampled"]
)
def test_a_value_that_was_cut_short_goes_on_as_if_it_had_not_been(driver: FakeDriver, options: dict[str, Any]) -> None:
    whole = driver.turn("whole", PROMPT, start=True, max_tokens=60, **options)
    parts = driver.turn("parts", PROMPT, start=True, max_tokens=4, **options)
    assert parts.status.finish_reason == "length"
    heard = parts.token_ids
    while parts.status.finish_reason == "length":
        parts = driver.turn("parts", max_tokens=3, grammar_from=len(PROMPT), **options)
        heard += parts.token_ids
    assert heard == whole.token_ids
    assert parts.status.finish_reason == "complete"
    assert json.loads(fake_text(heard)) == json.loads(fake_text(whole.token_ids))


def test_a_value_goes_on_behind_a_cut_and_in_a_branch(driver: FakeDriver) -> None:
    first = driver.turn("a", PROMPT, start=True, max_tokens=8, json_schema=LIST, **SAMPLED)
    history, begun = [*PROMPT, *first.token_ids], len(PROMPT)
    other = {"json_schema": LIST, "temperature": 1.0, "seed": 6}
    branch = driver.turn("b", start=True, fork_of="a", max_tokens=60, grammar_from=begun, **other)
    assert branch.token_ids == plain(other, history, 60, so_far=8)
    cut = driver.turn("a", max_tokens=60, rewind_to=begun + 3, grammar_from=begun, **other)
    assert cut.token_ids == plain(other, history[: begun + 3], 60, so_far=3)
    forced = driver.turn("b", fake_encode('["blue", '), rewind_to=begun, max_tokens=60, grammar_from=begun, **other)
    assert forced.token_ids == plain(other, [*PROMPT, *fake_encode('["blue", ')], 60, so_far=9)
    assert forced.status.finish_reason == "complete"


def test_without_a_beginning_the_value_begins_with_the_answer(driver: FakeDriver) -> None:
    driver.turn(1, PROMPT, start=True, max_tokens=4, regex=DATE)
    again = driver.turn(1, max_tokens=20, regex=DATE)
    assert re.fullmatch(DATE, fake_text(again.token_ids))


@pytest.mark.parametrize(
    ("grammar_from", "words"),
    [(0, "beginning"), (len(PROMPT) + 5, "behind the end"), (len(PROMPT) - 1, "beginning")],
)
def test_what_is_no_value_so_far_is_refused_and_changes_nothing(
    driver: FakeDriver, grammar_from: int, words: str
) -> None:
    first = driver.turn(1, PROMPT, start=True, max_tokens=4, regex=DATE)
    refused = driver.turn(1, max_tokens=20, regex=DATE, grammar_from=grammar_from)
    assert refused.code == "FAILED_PRECONDITION"
    assert words in str(refused.error)
    again = driver.turn(1, max_tokens=20, regex=DATE, grammar_from=len(PROMPT))
    assert re.fullmatch(DATE, fake_text([*first.token_ids, *again.token_ids]))


def test_embeddings_are_no_value(driver: FakeDriver) -> None:
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    answer = driver.turn(1, EmbedInput(torch.ones(2, HIDDEN_SIZE)), max_tokens=9, regex=DATE, grammar_from=len(PROMPT))
    assert answer.code == "FAILED_PRECONDITION"
    assert "embeddings" in str(answer.error)


# ---- what happens meanwhile ----------------------------------------------------------------------------------------


def test_a_turn_that_loses_its_pages_keeps_to_its_grammar() -> None:
    for is_asynchronous in (False, True):
        driver = driver_of(num_pages=24, max_context=64, max_batch_tokens=12, is_asynchronous=is_asynchronous)
        answers = {}
        for number in range(8):
            answers[number], _ = driver.post(number, [number, *PROMPT], start=True, max_tokens=40, regex="[a-e]{40}")
            driver.engine.step()
        driver.run()
        assert driver.engine.recorder.metrics.stalled_steps.total() == 0
        for number, answer in answers.items():
            assert answer.token_ids == plain({"regex": "[a-e]{40}"}, [number, *PROMPT], 40)
            num_computed = answer.status.usage["computed_tokens"]
            answers[number] = num_computed > 1 + len(PROMPT) + 39
        assert any(answers.values()), "nobody lost any page"


def test_an_interrupt_ends_a_value_and_the_next_turn_is_free_of_it(driver: FakeDriver) -> None:
    driver.turn(2, PROMPT, start=True, max_tokens=1, regex=DATE)  # now it is compiled
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=30, regex=DATE)
    driver.steps(3)
    assert 0 < len(answer.token_ids) < 10
    after, _ = driver.post(1, [5], on_overlap="interrupt", max_tokens=6, ignore_eos=True)
    driver.run()
    assert answer.status.finish_reason == "interrupted"
    assert after.token_ids == expected_tokens([*PROMPT, *answer.token_ids, 5], 6)


def test_a_turn_whose_client_leaves_is_undone_and_done_again_the_same(driver: FakeDriver) -> None:
    driver.turn(2, PROMPT, start=True, max_tokens=1, regex=DATE)  # now it is compiled
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    answer, turn = driver.post(1, max_tokens=30, regex=DATE, **SAMPLED)
    driver.steps(4)
    driver.engine.cancel(turn)
    driver.run()
    again = driver.turn(1, max_tokens=30, regex=DATE, **SAMPLED)
    assert again.token_ids == plain({"regex": DATE, **SAMPLED}, PROMPT, 30)
    assert 0 < len(answer.token_ids) < 10
    assert again.token_ids[: len(answer.token_ids)] == answer.token_ids


def test_a_numbered_turn_is_answered_from_its_record(driver: FakeDriver) -> None:
    first = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=30, regex=DATE)
    again = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=30, regex=DATE)
    assert again.token_ids == first.token_ids
    assert again.status.replayed
    other = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=30, regex="[0-9]+")
    assert other.code == "INVALID_ARGUMENT"


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_no_grammar_is_refused_at_once_and_changes_nothing(driver: FakeDriver) -> None:
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    num_passes = len(driver.runner.batches)
    refused = driver.turn(1, [3], max_tokens=9, json_schema='{"type": "frob"}')
    assert refused.code == "INVALID_ARGUMENT"
    assert "frob" in str(refused.error)
    assert len(driver.runner.batches) == num_passes
    assert driver.turn(1, [4], max_tokens=3, ignore_eos=True).token_ids == expected_tokens([*PROMPT, 4], 3)


def test_an_end_closes_the_session_though_its_grammar_is_refused(driver: FakeDriver) -> None:
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    assert driver.turn(1, [3], end=True, max_tokens=9, regex="(").code == "INVALID_ARGUMENT"
    assert driver.turn(1, [4], max_tokens=3).code == "NOT_FOUND"


def test_a_start_with_a_bad_grammar_opens_nothing(driver: FakeDriver) -> None:
    assert driver.turn(1, PROMPT, start=True, max_tokens=9, regex="(").code == "INVALID_ARGUMENT"
    assert driver.turn(1, [4], max_tokens=3).code == "NOT_FOUND"


def test_a_grammar_that_blows_up_in_an_answer_undoes_its_turn_and_no_other(driver: FakeDriver) -> None:
    grammar = 'start: "b" s\ns: s s | s s s | "a"'  # harmless for its first tokens, and ever slower
    free, _ = driver.post(2, [7], start=True, max_tokens=60, ignore_eos=True)
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    bias = json.dumps(dict.fromkeys(FAKE_ENDS, -100))
    failed = driver.turn(1, [3], max_tokens=200, grammar=grammar, logit_bias=bias)
    assert failed.code == "INVALID_ARGUMENT"
    assert "simpler" in str(failed.error)
    assert free.token_ids == expected_tokens([7], 60)
    assert driver.turn(1, [4], max_tokens=3, ignore_eos=True).token_ids == expected_tokens([*PROMPT, 4], 3)
    assert driver.turn(1, [4], max_tokens=3, grammar=grammar).code == "INVALID_ARGUMENT"


def test_without_grammars_the_options_are_refused() -> None:
    driver = driver_of(grammars=None)
    answer = driver.turn(1, PROMPT, start=True, max_tokens=9, regex=DATE)
    assert answer.code == "INVALID_ARGUMENT"
    assert "token that ends an answer" in str(answer.error)


def test_biases_are_of_ids_that_the_model_has(driver: FakeDriver) -> None:
    answer = driver.turn(1, PROMPT, start=True, max_tokens=2, logit_bias='{"97": 1}')
    assert answer.code == "INVALID_ARGUMENT"
    assert "0 to 96" in str(answer.error)


# ---- beside the engine's thread ------------------------------------------------------------------------------------


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    backgrounds = AllByHand()
    driver = driver_of(new_background=backgrounds, max_queued_turns=2)
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    waiting, _ = driver.post(1, [3], max_tokens=20, regex=DATE)
    behind, _ = driver.post(1, [4], max_tokens=0)
    driver.steps(3)
    free, _ = driver.post(2, [9], start=True, max_tokens=5, ignore_eos=True)
    driver.steps(8)
    assert free.token_ids == expected_tokens([9], 5)
    assert not waiting.is_done
    assert not behind.is_done
    backgrounds.of["microturn-grammars"].do()
    driver.run()
    assert waiting.token_ids == plain({"regex": DATE}, [*PROMPT, 3], 20)
    assert behind.status.context_len == len(PROMPT) + 1 + 10 + 1


def test_a_grammar_that_is_known_is_not_waited_for() -> None:
    backgrounds = AllByHand()
    driver = driver_of(new_background=backgrounds)
    for number in range(2):
        answer, _ = driver.post(number, PROMPT, start=True, max_tokens=20, regex=DATE)
        driver.steps(1)
        if number == 0:
            backgrounds.of["microturn-grammars"].do()
        driver.run()
        assert answer.token_ids == plain({"regex": DATE}, PROMPT, 20)
    assert not backgrounds.of["microturn-grammars"].jobs


def test_a_turn_that_waits_for_its_grammar_ends_in_time() -> None:
    driver = driver_of(new_background=AllByHand())
    driver.turn(1, PROMPT, start=True, max_tokens=0)
    waiting, _ = driver.post(1, [3], max_tokens=20, regex=DATE, deadline_ms=100)
    driver.steps(1)
    driver.clock.now_s += 0.2
    driver.steps(1)
    assert waiting.code == "DEADLINE_EXCEEDED"
    assert driver.turn(1, [4], max_tokens=3, ignore_eos=True).token_ids == expected_tokens([*PROMPT, 4], 3)
