"""Tests of answer_grammar: answers that match one of several grammars, as a value or calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from jsonschema import validate

from microturn.errors import FailedPrecondition, InvalidArgument
from microturn.text.answer_grammar import AnswerGrammar, AnswerMatcher
from microturn.text.grammar_source import GrammarSource
from support import grammars, tool_notations
from support.grammars import OTHER_END, encode, ids_of
from support.tool_notations import FAMILIES, TOOLS, answer_of, calls_in, check, grammar_of, source_of, spelled

CALLS = source_of("required", TOOLS)
REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 40}, "name": {"enum": ["Bern", "Zug"]}},
    "required": ["degrees"],
    "additionalProperties": False,
}
# Those that begin as calls of some family do.
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": REPORT,
    "named": {**REPORT, "required": ["name"], "properties": {"name": {"enum": ["Bern", "get_"]}}},
    "array": {"type": "array", "items": {"enum": ["get_weather", 1, True]}, "minItems": 1, "maxItems": 3},
    "choice": {"enum": ["a", 1]},
}


def json_of(schema: dict[str, Any]) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(schema))


def accepts(grammar: AnswerGrammar, answer: Sequence[int], ends: Collection[int] = (tool_notations.END,)) -> bool:
    """Whether an answer is allowed, and may end."""
    matcher = grammar.begin()
    for token_id in answer:
        if matcher.is_complete or token_id not in ids_of(matcher.allowed(), 1 << 10):
            return False
        matcher.accept(token_id)
    return matcher.is_complete or any(end in ids_of(matcher.allowed(), 1 << 10) for end in ends)


# ---- a value or calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_a_value_or_calls_and_either_is_what_it_would_be_alone(family: str, schema: str) -> None:
    """In one grammar in Lark, a call that begins as `{"name": "f", ` kept every object without that key away."""
    value, both = json_of(SCHEMAS[schema]), grammar_of(family, json_of(SCHEMAS[schema]), CALLS)
    for seed in range(20):
        assert accepts(both, answer_of(grammar_of(family, value), seed))
        assert accepts(both, answer_of(grammar_of(family, CALLS), seed))
        answer = answer_of(both, seed)
        if accepts(grammar_of(family, value), answer):
            validate(json.loads(spelled(answer)), SCHEMAS[schema])
        else:
            assert accepts(grammar_of(family, CALLS), answer)
            for call in calls_in(spelled(answer)):
                check(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_nothing_else(family: str) -> None:
    both = grammar_of(family, json_of(REPORT), CALLS)
    value, call = (answer_of(grammar_of(family, source), 1) for source in (json_of(REPORT), source_of("stop", TOOLS)))
    other = answer_of(grammar_of(family, source_of("stpo", [{"name": "stpo"}])), 1)
    for answer in (
        *(encode("It is warm."), encode('{"degrees": 41}'), encode("{}"), encode("[]"), encode('{"name": "Bern"}')),
        *([*value, *call], [*call, *value], [*encode(" "), *call], [*value, *value], other),
    ):
        assert not accepts(both, answer), spelled(answer)


def test_a_call_and_a_value_part_where_they_differ() -> None:
    both = grammar_of("llama3_json", json_of(SCHEMAS["named"]), source_of("get_weather", TOOLS))
    common = encode('{"name": "get_')
    assert set(ids_of(both.begin(common).allowed(), tool_notations.NUM_TOKENS)) == set(encode('"w'))
    assert ids_of(both.begin([*common, *encode('"')]).allowed(), tool_notations.NUM_TOKENS) == encode("}")
    assert ids_of(both.begin([*common, *encode("w")]).allowed(), tool_notations.NUM_TOKENS) == encode("e")


def test_a_format_of_any_kind_has_its_own_rules_and_lexemes() -> None:
    """The names of its rules are those of our grammars of calls, and its lexeme goes on where a call has ended one."""
    for source, value in [
        (GrammarSource("grammar", 'start: call args_0\ncall: "["\nargs_0: /[a-z_]+/ "!"'), "[get_weather!"),
        (GrammarSource("regex", r"[\[a-z_]+"), "[get_weather"),
        (GrammarSource("choice", '["[get_weather]", "[]"]'), "[get_weather]"),
    ]:
        both = grammar_of("pythonic", source, CALLS)
        assert accepts(both, encode(value))
        assert accepts(both, encode('[get_weather(city="Bern", is_long=True)]'))


# ---- several grammars of whatever kind -------------------------------------------------------------------------------


def any_of(*regexes: str) -> AnswerGrammar:
    ours = grammars.grammars()
    return AnswerGrammar(tuple(ours.compile(GrammarSource("regex", regex)) for regex in regexes))


def allowed(matcher: AnswerMatcher, banned: Sequence[int] = ()) -> set[int]:
    return set(ids_of(matcher.allowed(banned)))


def bytes_of(text: str) -> set[int]:
    return set(encode(text))


ENDS = {grammars.END, OTHER_END}


def test_what_one_of_them_allows_is_allowed_until_it_has_dropped_out() -> None:
    matcher = any_of("ab+", "a[cd]", "ef").begin()
    assert allowed(matcher) == bytes_of("ae")
    matcher.accept(ord("a"))
    assert allowed(matcher) == bytes_of("bcd")
    matcher.accept(ord("b"))
    assert allowed(matcher) == {ord("b"), *ENDS}
    assert not matcher.is_complete
    matcher.accept(OTHER_END)
    assert matcher.is_complete


def test_it_ends_where_it_is_whole_by_one_of_them() -> None:
    matcher = any_of("ab", "a[bc]d").begin()
    matcher.accept(ord("a"))
    assert not matcher.is_complete
    matcher.accept(ord("b"))
    assert matcher.is_complete


def test_what_is_banned_is_not_allowed_unless_nothing_else_is_left() -> None:
    matcher = any_of("ab*").begin()
    assert allowed(matcher, [ord("a")]) == {ord("a")}
    matcher.accept(ord("a"))
    assert allowed(matcher, [*ENDS]) == {ord("b")}
    assert allowed(matcher, [ord("b"), 10**6]) == ENDS
    assert allowed(matcher) == {ord("b"), *ENDS}, "a ban is for one token alone"


def test_what_is_banned_gives_way_only_where_none_of_them_has_anything_else() -> None:
    assert allowed(any_of("a", "b").begin(), [ord("a")]) == {ord("b")}
    assert allowed(any_of("a", "b").begin(), bytes_of("ab")) == bytes_of("ab")


def test_an_answer_goes_on_by_those_that_it_may_have_begun_by() -> None:
    grammar = any_of("ab+", "a[cd]e", "ef")
    assert allowed(grammar.begin(encode("a"))) == bytes_of("bcd")
    assert allowed(grammar.begin(encode("ac"))) == bytes_of("e")
    with pytest.raises(FailedPrecondition, match="beginning"):
        grammar.begin(encode("af"))
    with pytest.raises(FailedPrecondition, match="whole"):
        any_of("ab", "a[cd]e").begin(encode("ab"))


def test_a_grammar_that_has_blown_up_takes_the_others_with_it() -> None:
    grammar = any_of("a", "b")
    assert grammar.fault is None
    fault = grammar.alternatives[1].give_up("too slow", 1)
    assert grammar.fault is fault
    with pytest.raises(InvalidArgument, match="too slow"):
        grammar.begin()
