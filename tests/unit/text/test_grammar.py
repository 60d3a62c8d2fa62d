"""Tests of grammar: what may come next, when a value is whole, and what is refused."""

from __future__ import annotations

import json
import time

import pytest

from microturn.errors import FailedPrecondition, InvalidArgument
from microturn.sessions.options import MAX_CHOICES
from microturn.text import grammar
from microturn.text.grammar import Grammars, Matcher
from microturn.text.grammar_source import MAX_SOURCE_LEN, GrammarSource
from support.grammars import END, NUM_TOKENS, OTHER_END, encode, grammars, ids_of, word


@pytest.fixture(scope="module")
def ours() -> Grammars:
    return grammars()


def begin(ours: Grammars, kind: str, text: str, so_far: str = "") -> Matcher:
    return ours.compile(GrammarSource(kind, text)).begin(encode(so_far))


def allowed(matcher: Matcher) -> set[int]:
    ids = set(ids_of(matcher.allowed))
    assert ids == {token_id for token_id in range(NUM_TOKENS) if matcher.allows(token_id)}
    return ids


def bytes_of(text: str) -> set[int]:
    return set(encode(text))


# ---- what may come next --------------------------------------------------------------------------------------------


def test_only_what_the_regex_can_go_on_with_is_allowed(ours: Grammars) -> None:
    matcher = begin(ours, "regex", "[ab]c+")
    assert allowed(matcher) == bytes_of("ab")
    matcher.accept(ord("b"))
    assert allowed(matcher) == bytes_of("c")
    matcher.accept(ord("c"))
    assert allowed(matcher) == {ord("c"), END, OTHER_END}
    assert not matcher.is_complete


def test_a_value_that_nothing_can_follow_is_complete_with_its_last_token(ours: Grammars) -> None:
    matcher = begin(ours, "choice", json.dumps(["red", "green"]))
    assert allowed(matcher) >= {word(b"red"), ord("r"), ord("g")}
    matcher.accept(word(b"red"))
    assert matcher.is_complete


def test_a_value_that_could_go_on_is_complete_with_an_end(ours: Grammars) -> None:
    for end in (END, OTHER_END):
        matcher = begin(ours, "choice", json.dumps(["red", "reddish"]))
        matcher.accept(word(b"red"))
        assert not matcher.is_complete
        assert allowed(matcher) == {ord("d"), END, OTHER_END}
        matcher.accept(end)
        assert matcher.is_complete


@pytest.mark.parametrize("choice", ["a\x7fb", "a\x1fb"])
def test_a_choice_may_have_any_character(ours: Grammars, choice: str) -> None:
    """DEL is no character of a string in Lark's notation, and json.dumps leaves it as it is."""
    ours.compile(GrammarSource("choice", json.dumps([choice])))


@pytest.mark.parametrize("num_choices", [1000, MAX_CHOICES])
def test_a_choice_may_have_as_many_entries_as_the_option(ours: Grammars, num_choices: int) -> None:
    """From a thousand on each was refused: it is a row of as many items to the parser."""
    choices = [f"{number:04}" for number in range(num_choices)]
    matcher = begin(ours, "choice", json.dumps(choices))
    for token_id in encode(choices[-1]):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)
    assert matcher.is_complete


def test_a_schema_is_followed_to_its_last_brace(ours: Grammars) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    matcher = begin(ours, "json_schema", json.dumps({**schema, "additionalProperties": False}))
    for token_id in encode('{"n": 12}'):
        assert not matcher.is_complete
        assert token_id in allowed(matcher)
        matcher.accept(token_id)
    assert matcher.is_complete


def test_json_is_written_as_python_writes_it(ours: Grammars) -> None:
    value = {"a": [1, 2, {"b": None}], "c": "x"}
    matcher = begin(ours, "json_schema", "{}", so_far=json.dumps(value)[:-1])
    assert ord("}") in allowed(matcher)
    matcher = begin(ours, "json_schema", "{}", so_far='{"a":')
    assert allowed(matcher) == {ord(" ")}


def test_a_schema_may_ask_for_other_whitespace(ours: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "x-guidance": {"item_separator": ","}}
    matcher = begin(ours, "json_schema", json.dumps(schema), so_far="[true,")
    assert ord(" ") not in allowed(matcher)


def test_a_lark_grammar_may_name_special_tokens(ours: Grammars) -> None:
    matcher = begin(ours, "grammar", 'start: "x" <|other|> "y"', so_far="x")
    assert allowed(matcher) == {OTHER_END}
    matcher.accept(OTHER_END)
    assert not matcher.is_complete
    assert allowed(matcher) == {ord("y")}


def test_half_a_character_is_allowed_where_a_token_is_no_more(ours: Grammars) -> None:
    matcher = begin(ours, "choice", json.dumps(["é!"]))
    assert allowed(matcher) == {word(b"\xc3")}
    matcher.accept(word(b"\xc3"))
    assert allowed(matcher) == {word(b"\xa9")}


def test_an_id_without_text_is_never_allowed() -> None:
    matcher = grammars(num_padding=70).compile(GrammarSource("regex", "(?s:.)*")).begin()
    words = matcher.allowed
    assert len(words) == -(-(NUM_TOKENS + 70) // 32)
    assert max(ids_of(words, NUM_TOKENS)) == OTHER_END


# ---- where an answer goes on ---------------------------------------------------------------------------------------


def test_a_value_goes_on_behind_its_first_tokens(ours: Grammars) -> None:
    source = GrammarSource("regex", "[0-9]{4}-[0-9]{2}")
    whole = ours.compile(source).begin()
    for at, token_id in enumerate(encode("2026-11")):
        assert ids_of(ours.compile(source).begin(encode("2026-11"[:at])).allowed) == ids_of(whole.allowed)
        whole.accept(token_id)


@pytest.mark.parametrize("so_far", ["2x", "2026-110", "é"])
def test_what_is_no_beginning_of_a_value_is_refused(ours: Grammars, so_far: str) -> None:
    with pytest.raises(FailedPrecondition, match="beginning"):
        begin(ours, "regex", "[0-9]{4}-[0-9]{2}", so_far=so_far)


def test_behind_a_whole_value_nothing_goes_on(ours: Grammars) -> None:
    with pytest.raises(FailedPrecondition, match="whole"):
        begin(ours, "regex", "[0-9]{4}-[0-9]{2}", so_far="2026-11")


def test_an_id_of_no_vocabulary_is_no_beginning(ours: Grammars) -> None:
    for token_id in (-1, NUM_TOKENS, 2**40):
        with pytest.raises(FailedPrecondition, match="beginning"):
            ours.compile(GrammarSource("regex", "a+")).begin([token_id])


def test_answers_of_one_grammar_do_not_meet(ours: Grammars) -> None:
    compiled = ours.compile(GrammarSource("regex", "a[bc]{2}"))
    one, other = compiled.begin(), compiled.begin()
    one.accept(ord("a"))
    assert allowed(other) == {ord("a")}
    assert allowed(one) == bytes_of("bc")


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "", "no answer"),
        ("regex", r"a[^\s\S]", "no answer"),
        ("choice", '["\u4f60"]', "no answer"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", "start: (", "Expected token"),
        ("grammar", 'begin: "x"', "start"),
        ("grammar", "start: <|no such|>", "no such"),
        ("json_schema", "{", "JSON"),
        ("json_schema", "true", "a JSON object"),
        ("json_schema", "[1]", "a JSON object"),
        ("json_schema", '{"type": "frob"}', "frob"),
        ("json_schema", '{"not": {"type": "string"}}', '"not"'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum"),
        ("json_schema", '{"$ref": "https://example.com/x.json"}', "example.com"),
        ("json_schema", '{"type": "array", "items": ' * 300 + "{}" + "}" * 300, "recursion"),
        ("json_schema", "[" * 30_000, "JSON"),
        ("json_schema", '{"enum": ["\\ud800"]}', "hex escape"),
        ("json_schema", '{"items": {"properties": {"a": {"minLength": 50000}}}}', "minLength"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_name_and_the_reason(
    ours: Grammars, kind: str, text: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        ours.compile(GrammarSource(kind, text))
    message = refusal.value.args[0]
    assert f"'{kind}'" in message
    assert words in message
    assert "\n" not in message
    assert len(message) < 500


def test_a_text_that_is_no_unicode_is_refused(ours: Grammars) -> None:
    with pytest.raises(InvalidArgument):
        ours.compile(GrammarSource("regex", "a\ud800"))


BLOW_UPS = {
    "counts in counts": ("regex", "((a{1,100}){1,100}){1,100}"),
    "optional letters": ("regex", "(a?){500}a{500}"),
    "many items": ("json_schema", '{"type": "array", "minItems": 10000, "items": {"const": 1}}'),
    "twice as many with each level": (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    **{
                        f"d{at}": {
                            "type": "object",
                            "properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in "ab"},
                            "required": ["a", "b"],
                            "additionalProperties": False,
                        }
                        for at in range(30)
                    },
                    "d30": {"const": 1},
                },
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "ambiguous": ("grammar", 'start: s\ns: s s | s s s | "a"'),
    "many rules": ("grammar", "start: " + " | ".join(f'"x{at}" start?' for at in range(3500))),
}


@pytest.mark.parametrize("name", BLOW_UPS)
def test_what_blows_up_is_refused_within_a_second_and_then_at_once(ours: Grammars, name: str) -> None:
    source = GrammarSource(*BLOW_UPS[name])
    began_s = time.thread_time()
    with pytest.raises(InvalidArgument, match="simpler"):
        _write_letters(ours.compile(source))
    assert time.thread_time() - began_s < 1
    assert ours.find(source) is None or _is_refused_at_once(ours, source)


def _write_letters(compiled: grammar.Grammar, begin: str = "") -> None:
    matcher = compiled.begin(encode(begin))
    for _ in range(2000):
        matcher.accept(ord("a"))


def _is_refused_at_once(ours: Grammars, source: GrammarSource) -> bool:
    compiled = ours.find(source)
    assert compiled is not None
    began_s = time.thread_time()
    with pytest.raises(InvalidArgument, match="simpler"):
        compiled.begin()
    return time.thread_time() - began_s < 0.01


def test_a_source_that_is_too_long_is_refused(ours: Grammars) -> None:
    with pytest.raises(InvalidArgument, match=str(MAX_SOURCE_LEN)):
        ours.compile(GrammarSource("regex", "a" * (MAX_SOURCE_LEN + 1)))


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_KEPT", 2)
    ours = grammars()
    sources = [GrammarSource("regex", letter) for letter in "abc"]
    first, second = (ours.compile(source) for source in sources[:2])
    assert ours.find(sources[0]) is first
    assert ours.compile(sources[0]) is first
    ours.compile(sources[2])
    assert ours.find(sources[1]) is None, "the one that was not asked for the longest time"
    assert ours.find(sources[0]) is first
    assert allowed(second.begin()) == bytes_of("b"), "whoever has it keeps it"


def test_the_same_text_of_another_kind_is_another_grammar(ours: Grammars) -> None:
    assert allowed(begin(ours, "regex", "[ab]")) == bytes_of("ab")
    with pytest.raises(InvalidArgument):
        begin(ours, "json_schema", "[ab]")


@pytest.mark.parametrize(("character", "num_bytes"), [("a", 1), ("é", 2)], ids=["one byte", "more"])
def test_a_text_with_a_bound_may_be_longer_than_the_states_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, character: str, num_bytes: int
) -> None:
    """Each of its bytes is a state: once its answer alone had visited too many, the grammar was refused to all."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 300)
    source = GrammarSource("json_schema", json.dumps({"type": "string", "maxLength": 1500 // num_bytes}))
    compiled = grammars().compile(source)
    matcher, another = compiled.begin(), compiled.begin(encode('"'))
    for token_id in encode(json.dumps(character * (1200 // num_bytes), ensure_ascii=False)):
        assert matcher.allows(token_id)
        matcher.accept(token_id)
    assert matcher.is_complete
    another.accept(ord("b"))
    assert compiled.begin(encode('"' + character)).allows(ord('"'))


def test_an_answer_that_is_too_long_is_refused_and_the_grammar_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 300)
    monkeypatch.setattr(grammar, "MAX_OWN_LEXER_STATES", 600)
    compiled = grammars().compile(GrammarSource("json_schema", json.dumps({"type": "string", "maxLength": 5000})))
    with pytest.raises(InvalidArgument, match=r"answer is too long for it: .*at most 600 bytes"):
        _write_letters(compiled, begin='"')
    assert compiled.fault is None
    assert ord("a") in allowed(compiled.begin(encode('"')))


def test_a_grammar_that_many_answers_have_used_goes_on_as_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that one answer visits are kept for the next, up to a number; that many must not end the grammar."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 400)
    source = GrammarSource("regex", "[ab]*a[ab]{12}")
    compiled = grammars().compile(source)
    for number in range(2**6):
        matcher = compiled.begin()
        for at in range(24):
            bit = (number * 2654435761 >> at) & 1
            assert allowed(matcher) >= bytes_of("ab")
            matcher.accept(ord("ab"[bit]))
