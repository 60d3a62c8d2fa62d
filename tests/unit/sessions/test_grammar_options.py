"""Tests of options: what an answer must match, and biases of its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.sessions.options import OF_ONE_TURN, TurnOptions, grammar_source, parse_parameters, parse_turn_options
from microturn.text.grammar_source import KINDS, MAX_SOURCE_LEN, GrammarSource


def parsed(**values: Any) -> dict[str, Any]:
    options, _ = parse_parameters(json.dumps(values), start=False)
    return options


@pytest.mark.parametrize(
    ("kind", "text"), [("json_schema", '{"type": "object"}'), ("regex", "[0-9]+"), ("grammar", 'start: "a"')]
)
def test_a_grammar_is_a_text(kind: str, text: str) -> None:
    assert grammar_source(parsed(**{kind: text})) == GrammarSource(kind, text)
    for bad in ("", "x" * (MAX_SOURCE_LEN + 1), 1, {"type": "object"}, None):
        with pytest.raises(InvalidArgument, match=f"option '{kind}' is a string of 1 to {MAX_SOURCE_LEN} characters"):
            parsed(**{kind: bad})


def test_choices_are_a_json_list_of_texts() -> None:
    source = grammar_source(parsed(choice='["yes", "nö"]'))
    assert source is not None
    assert (source.kind, json.loads(source.text)) == ("choice", ["yes", "nö"])
    for bad in ("[]", '[""]', "yes", "[1]", json.dumps(["x"] * 1025), json.dumps(["x" * (MAX_SOURCE_LEN + 1)]), 3):
        with pytest.raises(InvalidArgument, match="option 'choice' is a JSON list of 1 to 1024 strings"):
            parsed(choice=bad)


def test_an_answer_matches_one_grammar_alone() -> None:
    assert grammar_source(parsed(max_tokens=3)) is None
    with pytest.raises(InvalidArgument, match="'choice' and 'regex' both say what the answer is: give one"):
        parsed(regex="a", choice='["a"]')


def test_a_value_that_goes_on_needs_its_grammar() -> None:
    assert parsed(regex="a", grammar_from=7)["grammar_from"] == 7
    with pytest.raises(InvalidArgument, match="'grammar_from' comes with one of json_schema, regex, grammar, choice"):
        parsed(grammar_from=7)
    with pytest.raises(InvalidArgument, match="integer"):
        parsed(regex="a", grammar_from=-1)


def test_a_grammar_is_of_its_turn_alone() -> None:
    assert {*KINDS, "grammar_from"} <= OF_ONE_TURN
    assert "logit_bias" not in OF_ONE_TURN


@pytest.mark.parametrize(
    ("written", "biases"),
    [
        ("{}", ()),
        ('{"7": 1.5, "0": -100}', ((0, -100.0), (7, 1.5))),
        ('{"3": "-2.5"}', ((3, -2.5),)),
        ({"5": 1}, ((5, 1.0),)),
    ],
)
def test_biases_are_a_json_object_of_ids(written: Any, biases: tuple[tuple[int, float], ...]) -> None:
    options = TurnOptions(**parsed(logit_bias=written))
    assert options.logit_bias == biases
    assert parse_turn_options({"logit_bias": json.loads(json.dumps(options.logit_bias))}) == options


@pytest.mark.parametrize(
    "bad",
    [
        *(
            '{"-1": 1}',
            '{"a": 1}',
            '{"1": 101}',
            '{"1": null}',
            '{"1": 1, "01": 2}',
            "[1]",
            "1",
            '"x"',
            "{",
            "[" * 99999,
        ),
        json.dumps(dict.fromkeys(range(1025), 0)),
        *(7, None, True, '{"1": NaN}'),
    ],
)
def test_bad_biases_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="option 'logit_bias' is a JSON object of at most 1024 token ids"):
        parsed(logit_bias=bad)
