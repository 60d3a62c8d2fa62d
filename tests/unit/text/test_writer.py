"""What is held and what goes out. That the ids are the right ones is tested through sessions."""

from collections.abc import Callable

import pytest

from microturn.text.boundaries import Boundaries
from microturn.text.writer import HeldText, Writer
from support.text_edge import TextEdge


@pytest.fixture
def edge(load_edge: Callable[[str], TextEdge]) -> TextEdge:
    return load_edge("byte_level")


def writer_in(edge: TextEdge, held: HeldText | None = None, last_id: int | None = None) -> Writer:
    is_empty = last_id is None
    return Writer(edge.model.encoder, held or HeldText(), last_id, is_context_empty=is_empty, puts_bos=is_empty)


def told(edge: TextEdge, ids: list[int]) -> str:
    return edge.oracle.decode(ids)


def test_the_last_word_is_held(edge: TextEdge) -> None:
    writer = writer_in(edge)
    writer.write("hello there", parse_special=False)
    writer.cut()
    assert told(edge, writer.ids) == "<s>hello"
    assert writer.held == HeldText(content=" there")


def test_text_of_the_template_merges_with_the_content(edge: TextEdge) -> None:
    writer = writer_in(edge)
    writer.write_template("<|head|>user\n")
    writer.write("hel", parse_special=False)
    writer.cut()
    assert told(edge, writer.ids) == "<s><|head|>"
    assert writer.held == HeldText(template="user\n", content="hel")
    writer.write("lo you the", parse_special=False)
    writer.cut()
    assert writer.held == HeldText(content=" the")


def test_what_may_become_a_special_token_is_held_until_it_has(edge: TextEdge) -> None:
    writer = writer_in(edge)
    writer.write("hello<|", parse_special=True)
    assert writer.held == HeldText(content="hello", undecided="<|")
    writer.write("end|>", parse_special=True)
    assert told(edge, writer.ids) == "<s>hello<|end|>"
    assert not writer.held


def test_what_may_become_a_special_token_is_text_when_other_text_follows(edge: TextEdge) -> None:
    writer = writer_in(edge)
    writer.write("hello<|", parse_special=True)
    writer.write("end|>", parse_special=False)
    writer.flush()
    assert edge.oracle.convert_tokens_to_ids("<|end|>") not in writer.ids
    assert told(edge, writer.ids) == "<s>hello<|end|>"


def test_bos_is_not_put_before_a_bos(edge: TextEdge) -> None:
    writer = writer_in(edge)
    writer.write("<s>hello", parse_special=True)
    writer.flush()
    assert told(edge, writer.ids) == "<s>hello"


def test_whitespace_that_belongs_to_a_special_token(load_edge: Callable[[str], TextEdge]) -> None:
    writer = writer_in(load_edge("metaspace"), last_id=5)
    writer.write_template("<|user|>\n")
    assert writer.held == HeldText(is_eaten=True)
    writer.write("  \n", parse_special=False)
    writer.write(" hello", parse_special=False)
    assert writer.held == HeldText(content="hello")


def test_whitespace_around_a_content(edge: TextEdge) -> None:
    writer = writer_in(edge, last_id=5)
    writer.write_template("\n\n")
    writer.drop_space_after()
    writer.write(" \n", parse_special=False)
    assert writer.held == HeldText(template="\n\n", is_trimmed=True)
    writer.write(" hi \n", parse_special=False)
    assert writer.held == HeldText(template="\n\n", content="hi \n")
    writer.drop_space_before()
    writer.write_template(" so")
    assert writer.held == HeldText(template="\n\nhi so")


def test_the_space_of_an_answer_is_left_out_where_no_content_follows(edge: TextEdge) -> None:
    for content, expected in (("", "A:"), ("no", "A: no")):
        writer = writer_in(edge, HeldText(template="A: "), last_id=5)
        writer.write(content, parse_special=False)
        writer.flush(answer_space=" ")
        assert told(edge, writer.ids) == expected


def test_held_text_is_not_looked_through_again(edge: TextEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text without a cut may be long, in scripts without spaces, and comes in many chunks."""
    starts = []
    last = Boundaries.last

    def count(boundaries: Boundaries, text: str, start: int) -> int:
        starts.append(start)
        return last(boundaries, text, start)

    monkeypatch.setattr(Boundaries, "last", count)
    held = HeldText()
    for chunk in ("ไทย" * 100, "ก็ดีไทย  ", " ครับ"):
        writer = writer_in(edge, held, last_id=5)
        writer.write(chunk, parse_special=False)
        writer.cut()
        held = writer.held
    assert starts == [0, 299, 306]
    assert held.content == "   ครับ"
