"""The text of a session against the model's own tokenizer and template, wherever the chunks were cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from microturn.errors import InvalidArgument
from microturn.text.boundaries import Boundaries
from microturn.text.chat_templates import ChatTemplates
from microturn.text.session_text import TextState
from microturn.text.writer import Writer
from support.text_edge import Context, TextEdge

# Pieces that tokenizers treat in ways of their own, and any character at all. (Not the four separators that are
# whitespace to Python and not to the tokenizers' regular expressions; a template that trims would be told apart.)
PIECES = (
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u3000",
        "the",
        " the",
        "hello",
        "don't",
        "'s",
        "I'm",
    ),
    *(
        "123",
        "4567",
        "3.14",
        "user",
        "assistant",
        "<|end",
        "|>",
        ">",
        "</",
        "。",
        "你好",
        "，世界",
        "한국어",
        "ไทย",
        "नमस्ते",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "👩‍👩‍👧",
        "🇩🇪",
        "\ufffd",
        "▁",
        "Ġ",
        "[INST]",
        "<b>",
        "…",
        ".",
        ",",
        "?!",
        "--",
        "\\",
        "{{",
    ),
)
texts = st.lists(
    st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"], exclude_characters="\x1c\x1d\x1e\x1f"),
    max_size=14,
).map("".join)
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def chats(draw: st.DrawFn) -> list[tuple[str, list[str]]]:
    """Messages by turns, the last of the user; each as the chunks it was cut into."""
    num_messages = 2 * draw(st.integers(0, 2)) + 1
    roles = [("user", "assistant")[index % 2] for index in range(num_messages)]
    if draw(st.booleans()):
        roles.insert(0, "system")
    return [(role, draw(st.lists(texts, min_size=1, max_size=4))) for role in roles]


def joined(chat: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    return [(role, "".join(chunks)) for role, chunks in chat]


def assume_comparable(chat: list[tuple[str, list[str]]], edge: TextEdge) -> None:
    assume(edge.has_system or chat[0][0] != "system")
    # A template's own tokens are parsed in the contents too when the whole chat is tokenized: ours never are.
    assume(not any(token.text in content for _, content in joined(chat) for token in edge.model.encoder.special_tokens))


def write_chat(context: Context, chat: list[tuple[str, list[str]]]) -> None:
    for role, chunks in chat:
        context.write(chunks[0], role=role)
        for chunk in chunks[1:]:
            context.write(chunk, role=None)
    context.make_way(role="assistant")


@many
@given(chat=chats())
def test_a_chat_in_chunks_has_the_ids_of_the_whole_chat(edge: TextEdge, chat: list) -> None:
    assume_comparable(chat, edge)
    context = edge.open()
    write_chat(context, chat)
    assert context.ids == edge.chat_ids(joined(chat))


@settings(many, max_examples=20)
@given(chat=chats(), data=st.data())
def test_a_turn_that_is_rolled_back_leaves_no_trace(edge: TextEdge, chat: list, data: st.DataObject) -> None:
    assume_comparable(chat, edge)
    context = edge.open()
    for role, chunks in chat:
        for chunk in chunks:
            state, num_ids = context.text.state, len(context.ids)
            context.write(
                data.draw(texts), role=role, parse_special=data.draw(st.booleans()), flush=data.draw(st.booleans())
            )
            context.make_way(before=[5])
            context.generate(data.draw(st.lists(st.integers(0, 300), max_size=3)), stop=["a"])
            context.text.state = state
            del context.ids[num_ids:]
            context.write(chunk, role=role)
    context.make_way(role="assistant")
    assert context.ids == edge.chat_ids(joined(chat))


EXAMPLE = [("user", ["\n\nHel", "lo the", "re, how a", "re you? "])]


def test_the_example_agrees(load_edge) -> None:
    edge = load_edge("smollm2")
    context = edge.open()
    write_chat(context, EXAMPLE)
    assert context.ids == edge.chat_ids(joined(EXAMPLE))


def test_text_that_is_not_held_is_noticed(load_edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: every chunk is encoded as it comes, so a word that the beat cut is torn."""
    edge = load_edge("smollm2")
    monkeypatch.setattr(Boundaries, "last", lambda _self, text, _start: len(text))
    context = edge.open()
    write_chat(context, EXAMPLE)
    assert context.ids != edge.chat_ids(joined(EXAMPLE))


def test_template_text_that_does_not_join_the_content_is_noticed(load_edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: the line break behind the role doesn't merge with the one that the content begins with."""
    edge = load_edge("smollm2")
    write_template = Writer.write_template

    def write_and_flush(writer: Writer, text: str) -> None:
        write_template(writer, text)
        writer.flush()

    monkeypatch.setattr(Writer, "write_template", write_and_flush)
    context = edge.open()
    write_chat(context, EXAMPLE)
    assert context.ids != edge.chat_ids(joined(EXAMPLE))


@many
@given(chunks=st.lists(texts, min_size=1, max_size=5))
def test_plain_text_in_chunks_has_the_ids_of_the_whole_text(edge: TextEdge, chunks: list[str]) -> None:
    context = edge.open()
    for chunk in chunks:
        context.write(chunk)
    context.make_way()
    text = "".join(chunks)
    assert context.ids == (edge.plain_ids(text) if text else [])


def test_most_of_the_text_has_ids_before_it_is_complete(edge: TextEdge) -> None:
    context = edge.open()
    context.write("The quick brown fox jumps over the lazy dog and then it sle")
    held = context.text.state.held.content
    assert held == (
        " sle"
        if " " in edge.model.encoder.boundaries.openers
        else "The quick brown fox jumps over the lazy dog and then it sle"
    )


def test_held_text_counts_too(load_edge) -> None:
    context = load_edge("smollm2").open()
    context.write("字" * 5000)
    assert context.ids == []
    assert context.text.least_num_ids("", enough=1000) > 1000


def test_cjk_text_is_cut_at_its_punctuation(load_edge) -> None:
    context = load_edge("gemma3").open()
    context.write("今天天气很好，我们去公园")
    assert context.text.state.held.content == "，我们去公园"


def test_bos_comes_once_and_with_the_first_ids(load_edge) -> None:
    edge = load_edge("gemma3")
    context = edge.open()
    assert context.write("Hel") == []
    assert context.write("lo th") == [2, *edge.oracle("Hello", add_special_tokens=False).input_ids]
    context.write("ere", flush=True)
    context.generate([100])
    context.write("again", flush=True)
    assert context.ids.count(2) == 1


def test_ids_of_a_client_get_no_bos_and_no_text_behind_them_does(load_edge) -> None:
    edge = load_edge("gemma3")
    context = edge.open()
    assert context.make_way(before=[100, 101]) == []
    context.write("hello", flush=True)
    assert context.ids == [100, 101, *edge.oracle("hello", add_special_tokens=False).input_ids]


def test_text_behind_an_embedding_is_not_the_first(load_edge) -> None:
    """The engine knows no last token behind an embedding, which must not be taken for an empty context."""
    edge = load_edge("gemma3")
    text = edge.open().text
    text.append_other(role=None, last_token_id=None, input_follows=True)
    ids = text.append_text("hello", role=None, parse_special=False, flush=True, last_token_id=None)
    assert ids == edge.oracle("hello", add_special_tokens=False).input_ids


def test_a_first_message_after_plain_text_brings_no_second_bos(load_edge) -> None:
    edge = load_edge("gemma3")
    context = edge.open()
    context.write("Be kind.", role=None)
    context.write("hello", role="user")
    context.make_way(role="assistant")
    assert context.ids == [*edge.plain_ids("Be kind."), *edge.chat_ids([("user", "hello")])[1:]]


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "byte_level", "sentence_piece", "metaspace"])
def test_a_message_that_the_model_ended_is_not_ended_again(load_edge, name: str) -> None:
    edge = load_edge(name)
    context = edge.open()
    context.write("hi", role="user")
    context.make_way(role="assistant")
    answer = edge.model.encoder.encode("hello there", begins=False)
    end = edge.model.chat_template().transition("assistant", "user", is_context_empty=False).text
    end_id = edge.model.encoder.special_tokens.parse(end, is_complete=True).parts[0][1].id
    context.generate([*answer, end_id])
    num_ids = len(context.ids)
    context.write("again", role="user")
    context.make_way(role="assistant")
    assert context.ids[num_ids - 1] == end_id
    assert end_id not in context.ids[num_ids : num_ids + 1]

    unended = edge.open()
    unended.write("hi", role="user")
    unended.make_way(role="assistant")
    unended.generate(answer)
    unended.write("again", role="user")
    unended.make_way(role="assistant")
    assert unended.ids == context.ids


def test_an_answer_may_be_begun_for_the_model(load_edge) -> None:
    edge = load_edge("smollm2")
    context = edge.open()
    context.write("hi", role="user")
    context.write("Sure, here", role="assistant", flush=True)
    assert context.ids == [
        *edge.chat_ids([("user", "hi")]),
        *edge.oracle("Sure, here", add_special_tokens=False).input_ids,
    ]


def test_the_space_before_an_answer_is_left_to_the_model(load_edge) -> None:
    """The template writes "[/INST] hello", where the space belongs to the word: asking for one it writes none."""
    edge = load_edge("sentence_piece")
    assert edge.model.chat_template().answer_space == " "
    context = edge.open()
    context.write("hello", role="user")
    context.make_way(role="assistant")
    assert edge.oracle.decode(context.ids).endswith("[/INST]")


def test_a_space_that_the_template_drops_makes_no_cut(load_edge) -> None:
    """The cut before a space at the end of a chunk was safe, until the template dropped the space and put its own text
    there: what had gone out already was torn off from it."""
    edge = load_edge("spelled_out")
    context = edge.open()
    context.write("so < ", role="user")
    context.make_way(role="assistant")
    assert context.ids == edge.chat_ids([("user", "so < ")])


def test_template_text_behind_an_empty_message_is_not_trimmed(load_edge) -> None:
    """Whitespace that the template drops before a content isn't that of its own text, if there is no content."""
    edge = load_edge("byte_level")
    context = edge.open()
    context.write("  ", role="user")
    context.make_way(role="assistant")
    assert context.ids == edge.chat_ids([("user", "")])


def test_messages_without_content(edge: TextEdge) -> None:
    context = edge.open()
    context.write("", role="user")
    context.make_way(role="assistant")
    assert context.ids == edge.chat_ids([("user", "")])


def test_an_empty_turn_changes_nothing(edge: TextEdge) -> None:
    context = edge.open()
    context.write("hello the", role="user")
    state = context.text.state
    assert context.write("") == []
    assert context.text.state == state


def test_a_role_without_a_template_is_refused(load_edge) -> None:
    context = load_edge("plain").open()
    with pytest.raises(InvalidArgument, match="has no chat template: send text without 'role'"):
        context.write("hi", role="user")
    assert context.text.state == TextState()
    with pytest.raises(InvalidArgument, match="no chat template"):
        load_edge("plain").open(tools=[{"name": "search"}])


def test_a_role_that_the_template_does_not_take_there_is_refused_and_nothing_changes(load_edge) -> None:
    context = load_edge("gemma3").open()
    context.write("hello", role="user")
    context.write("hi", role="assistant")
    state = context.text.state
    with pytest.raises(InvalidArgument, match=r"'assistant' begins a conversation.* user and assistant take turns"):
        load_edge("gemma3").open().write("hi", role="assistant")
    with pytest.raises(InvalidArgument, match="role 'system' follows role 'assistant'"):
        context.write("be kind", role="system")
    assert context.text.state == state


def test_special_tokens_are_plain_text_unless_asked_for(edge: TextEdge) -> None:
    special = next(token for token in edge.model.encoder.special_tokens if "end" in token.text and len(token.text) > 5)
    plain = edge.open()
    plain.write(f"say {special.text} now", flush=True)
    assert special.id not in plain.ids
    parsed = edge.open()
    parsed.write(f"say {special.text} now", parse_special=True, flush=True)
    assert parsed.ids.count(special.id) == 1


@pytest.fixture
def character(load_edge) -> tuple[Context, list[int]]:
    """A session, and the ids of a character that is several tokens."""
    edge = load_edge("byte_level")
    ids = edge.model.encoder.encode("ไ", begins=False)
    assert len(ids) == 3
    return edge.open(), ids


def test_a_character_goes_on_in_the_next_generation(character: tuple[Context, list[int]]) -> None:
    context, ids = character
    assert context.generate(ids[:2]) == ""
    assert context.write("") == []  # a keep-alive
    assert context.make_way() == []  # generation without input
    assert context.generate(ids[2:]) == "ไ"


@pytest.mark.parametrize("comes_between", ["text", "ids", "role"])
def test_a_character_that_input_cuts_off_is_told_nobody(
    character: tuple[Context, list[int]], comes_between: str
) -> None:
    """Its replacement began the next answer, of another message: structured output was no JSON any more."""
    context, ids = character
    context.write("hi", role="user")
    context.make_way(role="assistant")
    assert context.generate(ids[:2]) == ""
    if comes_between == "text":
        context.write("x", flush=True)
    elif comes_between == "ids":
        context.make_way(before=[9])
    else:
        context.write("and", role="user")
        context.make_way(role="assistant")
    assert context.generate([]) == ""
    assert context.generate(ids) == "ไ"
    assert context.generate(ids) == "ไ"


def test_an_answer_that_is_another_does_not_go_on_with_half_a_character(character: tuple[Context, list[int]]) -> None:
    context, ids = character
    assert context.generate(ids[:2]) == ""
    context.text.drop_half_character()
    assert context.generate(ids) == "ไ"


def test_an_answer_that_is_continued_keeps_the_space_before_its_next_word(load_edge) -> None:
    edge = load_edge("sentence_piece")
    (the, *_) = edge.model.encoder.encode("the", begins=True)
    context = edge.open()
    context.write("hello", role="user")
    context.make_way(role="assistant")
    first = context.generate([the])
    context.make_way(role="assistant")
    assert context.generate([the]) == f" {first}"
    context.write("hello", role="user")
    context.make_way(role="assistant")
    assert context.generate([the]) == first


def test_a_stop_string_is_left_out_and_stays_in_the_context(load_edge) -> None:
    edge = load_edge("smollm2")
    ids = edge.model.encoder.encode("one two\n\nUser: three", begins=True)
    context = edge.open()
    assert context.generate(ids, stop=["\n\nUser:"]) == "one two"
    assert edge.oracle.decode(context.ids) == "one two\n\nUser:"


def test_withheld_text_comes_out_when_the_turn_ends_or_the_stop_strings_change(load_edge) -> None:
    edge = load_edge("smollm2")
    text = edge.open().text
    text.begin_generation(["two three"])
    assert [text.accept(token_id).text for token_id in edge.model.encoder.encode("one two", begins=True)] == [
        "one",
        " ",
    ]
    assert text.end_generation() == "two"
    assert text.end_generation() == ""


def test_an_empty_stop_string_is_refused(load_edge) -> None:
    with pytest.raises(InvalidArgument, match="a stop string is empty"):
        load_edge("smollm2").open().text.begin_generation(["a", ""])


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city: 東京 'or' \"else\""}}]


def test_tools_are_told_where_the_template_has_a_place_for_them(load_edge) -> None:
    edge = load_edge("with_tools")
    context = edge.open(TOOLS)
    assert json.loads(context.text.tools) == TOOLS
    write_chat(context, EXAMPLE)
    assert context.ids == edge.chat_ids(joined(EXAMPLE), tools=TOOLS)
    assert context.ids != edge.chat_ids(joined(EXAMPLE))


def test_each_result_of_a_tool_is_a_message_of_its_own(load_edge) -> None:
    edge = load_edge("with_tools")
    context = edge.open(TOOLS)
    context.write("hello", role="user")
    context.write("the fox", role="assistant")
    context.write("the ", role="tool")
    context.write("dog")
    context.write("the lazy dog", role="tool")
    context.make_way(role="assistant")
    said = [("user", "hello"), ("assistant", "the fox"), ("tool", "the dog"), ("tool", "the lazy dog")]
    chat = [{"role": role, "content": content} for role, content in said]
    assert context.ids == edge.oracle.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True)["input_ids"]


def test_a_result_is_written_as_a_json_string_where_the_template_does_so(load_edge) -> None:
    edge = load_edge("tools_as_json")
    context = edge.open(TOOLS)
    context.write("hello", role="user")
    context.write("the fox", role="assistant")
    chunks = ['the "quick" ', "fox\\ \n\n", "jumps, 你好 ", '"over"']
    context.write(chunks[0], role="tool")
    for chunk in chunks[1:]:
        context.write(chunk)
    context.make_way(role="assistant")
    said = [("user", "hello"), ("assistant", "the fox"), ("tool", "".join(chunks))]
    chat = [{"role": role, "content": content} for role, content in said]
    assert context.ids == edge.oracle.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True)["input_ids"]


def test_a_session_keeps_its_template_however_many_others_there_are(load_edge, monkeypatch) -> None:
    """From the 33rd list of tools on, each micro-turn learnt its template anew: 10 to 400 ms for everybody."""
    edge = load_edge("with_tools")
    lists = [[{"type": "function", "function": {"name": f"tool_{number}"}}] for number in range(40)]
    contexts = [edge.open(tools) for tools in ([], *lists)]
    (role, [first, *chunks]), *rest = EXAMPLE
    for context in contexts:
        context.write(first, role=role)
    monkeypatch.setattr(ChatTemplates, "_learn", None)
    for context in contexts:
        write_chat(context, [(role, chunks), *rest])
    monkeypatch.undo()
    for context, tools in zip(contexts, ([], *lists), strict=True):
        assert context.ids == edge.chat_ids(joined(EXAMPLE), tools=tools or None)


def test_tools_that_the_template_does_not_know_are_refused(load_edge) -> None:
    with pytest.raises(InvalidArgument, match="has no place for tools"):
        load_edge("smollm2").open(TOOLS)
    with pytest.raises(InvalidArgument, match="does not take these tools"):
        load_edge("with_tools").open([{"name": "\ud800"}])


def written_and_read(context: Context) -> TextState:
    """A session's state as a file would bring it back."""
    return context.text.state_from_json(json.loads(json.dumps(context.text.state_as_json(context.text.state))))


def test_half_a_character_is_written_down_with_the_state(character: tuple[Context, list[int]]) -> None:
    context, ids = character
    context.text.begin_generation(["\ud83d", "stop"])
    for token_id in ids[:2]:
        context.text.accept(token_id)
    assert written_and_read(context) == context.text.state
    context.text.state = written_and_read(context)
    assert context.text.accept(ids[2]).text == "ไ"


def test_a_state_of_a_server_that_replaced_half_characters_is_read(character: tuple[Context, list[int]]) -> None:
    context, ids = character
    written = context.text.state_as_json(context.text.state)
    written["output"]["replaced"] = "\ufffd"
    context.text.state = context.text.state_from_json(written)
    assert context.generate(ids) == "ไ"


def test_what_is_no_state_is_refused(load_edge) -> None:
    context = load_edge("byte_level").open()
    written = context.text.state_as_json(context.text.state)
    for spoilt in ({}, {**written, "held": {"unheard": 1}}, {**written, "output": {"partial_char": "no hex"}}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            context.text.state_from_json(spoilt)


def test_the_state_is_all_there_is(load_edge) -> None:
    """A session that is given the state of another goes on like it, in another process too."""
    edge = load_edge("smollm2")
    first, second = edge.open(), edge.open()
    first.write("hello the", role="user")
    second.text.state, second.ids = written_and_read(first), list(first.ids)
    for context in (first, second):
        context.write("re you", role="user")
        context.make_way(role="assistant")
    assert second.ids == first.ids == edge.chat_ids([("user", "hello there you")])
