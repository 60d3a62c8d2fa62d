"""Tests of prepared_text: a prepared text becomes the ids that it becomes otherwise, whatever stands before it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from microturn.text.prepared_text import prepare_text
from microturn.text.session_text import SessionText
from support.text_edge import Context, TextEdge

ENOUGH = 10_000

words = st.sampled_from(
    ["so", "well,", "Ünïcode", "字。", "，", "12", "a.b", "…", "it's", "👍", "<|", "|>", "x" * 9, "\n", "\t", "  ", "-"]
)


def specials_of(edge: TextEdge) -> list[str]:
    return [token.text for token in edge.model.encoder.special_tokens][:6]


def texts(edge: TextEdge) -> st.SearchStrategy[str]:
    special = st.sampled_from([*specials_of(edge), *(text[:-1] for text in specials_of(edge))])
    return st.lists(st.one_of(words, special), max_size=14).map(lambda parts: " ".join(parts)) | st.text(max_size=20)


def write(
    context: Context, text: str, *, is_prepared: bool, parse_special: bool, flush: bool, role: str | None
) -> None:
    edge = context.text
    prepared = prepare_text(edge._model.encoder, text, parse_special=parse_special, enough=ENOUGH)
    context.ids += edge.append_text(
        text,
        role=role,
        parse_special=parse_special,
        flush=flush,
        last_token_id=context.last_id,
        prepared=prepared if is_prepared else None,
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prepared_text_has_the_same_ids_and_leaves_the_same_state(edge: TextEdge, data: st.DataObject) -> None:
    plain, prepared = edge.open(), edge.open()
    roles = [None, None, "user", "assistant"]
    for _ in range(data.draw(st.integers(1, 4))):
        text, parse_special = data.draw(texts(edge)), data.draw(st.booleans())
        flush, role = data.draw(st.booleans()), data.draw(st.sampled_from(roles))
        role = role if role != "assistant" or plain.text.state.role == "user" else None
        for context, is_prepared in ((plain, False), (prepared, True)):
            write(context, text, is_prepared=is_prepared, parse_special=parse_special, flush=flush, role=role)
        assert prepared.ids == plain.ids
        assert prepared.text.state == plain.text.state


def test_most_of_a_text_is_ids_before_its_turn(load_edge: Callable[[str], TextEdge]) -> None:
    edge = load_edge("smollm2")
    text = "One thing after the other, and so on. " * 50
    prepared = edge.model.prepare(text, False, ENOUGH)
    assert prepared.head == "One"
    assert prepared.held.content == " on. "
    assert edge.oracle.decode(prepared.ids) == text[3:-5]
    assert prepared.least_num_ids == len(prepared.ids)


def test_a_cut_within_a_special_token_is_none(load_edge: Callable[[str], TextEdge]) -> None:
    """The text before it may have begun the token."""
    edge = load_edge("smollm2")
    text = f"{'x' * 30}<|im_end|> and then some more of it"
    assert edge.model.prepare(text, True, ENOUGH).head == f"{'x' * 30}<|im_end|> and"
    assert edge.model.prepare(text, False, ENOUGH).head == f"{'x' * 30}<|im_end|>"


def test_a_text_that_is_too_long_is_counted_and_no_more(load_edge: Callable[[str], TextEdge]) -> None:
    prepared = load_edge("smollm2").model.prepare("so it is " * 10_000, False, 100)
    assert prepared.least_num_ids > 100
    assert not prepared.ids


def test_what_was_prepared_in_another_way_is_not_used(load_edge: Callable[[str], TextEdge]) -> None:
    edge = load_edge("smollm2")
    text = "So <|im_end|> it is and was and will be"
    codec = SessionText(edge.model)
    ids = codec.append_text(
        text,
        role=None,
        parse_special=True,
        flush=True,
        last_token_id=None,
        prepared=edge.model.prepare(text, False, ENOUGH),
    )
    assert ids == SessionText(edge.model).append_text(
        text, role=None, parse_special=True, flush=True, last_token_id=None
    )
