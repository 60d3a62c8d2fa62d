"""Whatever a client makes of a conversation, the server's context becomes it, and keeps what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn_gateway.answer import GeneratedText
from microturn_gateway.context import Cut, HeldContext, Message, Piece
from support.simulated_context import SimulatedContext, as_text


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


class Session:
    """A server's context, and what the gateway knows of it."""

    def __init__(self) -> None:
        self.server = SimulatedContext()
        self.held = HeldContext()

    def become(self, target: Sequence[Message], num_held: int = 0) -> list[Message]:
        missing = self.held.become(target)
        assert missing is not None
        for message in missing:
            status = self.server.append(message, self.held.rewind_to, num_held)
            self.held.append(message, status.context_len)
        self.server.rewind(self.held.rewind_to)
        self.held.rewound(len(self.server))
        return missing

    def answer(self, *parts: str, ends: bool = False) -> None:
        generated = GeneratedText()
        self.held.go_on()
        events, status = self.server.answer(parts, self.held.rewind_to, ends=ends)
        for tokens in events:
            generated.take(tokens)
        self.held.answer(generated.piece(status), status.context_len)


def test_what_is_new_is_all_that_is_appended() -> None:
    session = Session()
    assert session.become([user("Hello")]) == [user("Hello")]
    session.answer("Hi", " there")
    assert session.become([user("Hello"), assistant("Hi there"), user("Bye")]) == [user("Bye")]
    assert session.server.text == "<user>Hello<assistant>Hi there<user>Bye"


def test_a_message_that_grows_is_gone_on_with() -> None:
    session = Session()
    session.become([user("so the first")], num_held=3)
    assert session.become([user("so the first thing")], num_held=2) == [user(" thing")]
    assert session.server.text == "<user>so the first thing"


def test_an_answer_that_was_heard_in_part_is_cut_between_its_tokens() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer("One", " two", " three", " four")
    heard = len(session.server) - 2
    assert session.become([user("Hello"), assistant("One two"), user("Stop")]) == [user("Stop")]
    assert session.server.text == "<user>Hello<assistant>One two<user>Stop"
    assert session.held.pieces[1].end == heard


def test_what_ends_within_a_token_is_appended_as_text() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer("One", " two", " three")
    assert session.become([user("Hello"), assistant("One tw")]) == [assistant(" tw")]
    assert session.server.text == "<user>Hello<assistant>One tw"


def test_no_cut_falls_into_a_character() -> None:
    session = Session()
    session.become([user("?")])
    session.answer("a", "", "é", "b")
    session.become([user("?"), assistant("a")])
    assert session.held.end == 4  # <user> ? <assistant> a


def test_what_a_client_sent_is_cut_between_turns_only() -> None:
    session = Session()
    session.become([user("one two")])
    assert session.become([user("one 2")]) == [user("one 2")]
    assert session.held.pieces == [Piece("user", "one 2", 6)]


def test_an_answer_that_is_asked_for_again_goes() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer("Hi")
    assert session.become([user("Hello")]) == []
    assert session.server.text == "<user>Hello"


def test_an_answer_without_text_leaves_nothing_behind() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer("")
    assert session.become([user("Hello"), user("\nSo?")]) == [user("\nSo?")]
    assert session.server.text == "<user>Hello\nSo?"


def test_an_answer_is_recognised_without_its_surrounding_space() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer(" Hi", " you\n")
    said = [user("Hello"), assistant("Hi you"), user("Bye")]
    assert session.become(session.held.recognised(said)) == [user("Bye")]


def test_an_example_of_the_client_that_is_like_an_answer_stays_as_it_was_sent() -> None:
    """The example says "Yes", and later the model says it with a line break: all of it comes back unchanged."""
    session = Session()
    example = [user("Is it?"), assistant("Yes"), user("And now?")]
    session.become(example)
    session.answer("Yes", "\n")
    said = [*example, assistant("Yes\n"), user("Bye")]
    assert session.held.recognised(said) == said
    assert session.become(session.held.recognised(said)) == [user("Bye")]


def test_an_answer_is_recognised_in_its_own_place_only() -> None:
    session = Session()
    session.become([user("Is it?")])
    session.answer("Yes", "\n")
    said = [user("Is it?"), assistant("Yes"), user("And now?"), assistant("Yes")]
    assert session.held.recognised(said) == [user("Is it?"), assistant("Yes\n"), user("And now?"), assistant("Yes")]
    elsewhere = [user("Is that so?"), assistant("Yes")]
    assert session.held.recognised(elsewhere) == elsewhere


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_client_adds_to_an_answer_is_appended(ends: bool) -> None:
    """Where the answer had ended by itself, before the token that says so."""
    session = Session()
    session.become([user("Is it?")])
    session.answer("Yes", ends=ends)
    said = [user("Is it?"), assistant("Yes\n"), user("Bye")]
    assert session.become(session.held.recognised(said)) == [assistant("\n"), user("Bye")]
    assert session.server.tokens == ["<user>", *"Is it?", "<assistant>", "Yes", "\n", "<user>", *"Bye"]


def test_an_answer_that_ended_stays_whole_until_its_message_goes_on() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer("Hi", ends=True)
    whole = len(session.server)
    assert session.become([user("Hello"), assistant("Hi"), user("Bye")]) == [user("Bye")]
    assert session.held.pieces[1].end == whole
    session.become([user("Hello"), assistant("Hi")])
    assert len(session.server) == whole
    session.answer(" there", ends=True)
    assert session.held.pieces[-1].end == whole + 1
    assert session.server.text == "<user>Hello<assistant>Hi there"


def test_an_answer_that_said_nothing_and_ended_goes_on() -> None:
    session = Session()
    session.become([user("Hello")])
    session.answer(ends=True)
    assert session.become([user("Hello"), assistant("Hi")]) == [assistant("Hi")]
    assert session.server.text == "<user>Hello<assistant>Hi"


def test_the_text_that_stopped_an_answer_is_cut_off() -> None:
    generated = GeneratedText()
    context = SimulatedContext()
    events, status = context.answer(["One", " two", ""])
    for tokens in events:
        generated.take(tokens)
    stopped = generated.piece(type(status)(**{**vars(status), "stop_reason": "END"}))
    assert stopped == Piece("assistant", "One two", 3, (Cut(0, 1), Cut(3, 2), Cut(7, 3)))
    assert generated.piece(status).end == 4


def test_only_a_new_session_forgets_what_left_no_token() -> None:
    held = HeldContext()
    held.append(Message("user", "Hel"), 0)
    assert held.become([user("Bye")]) is None
    assert held.become([user("Hello")]) == [user("lo")]


def test_ids_are_content_like_text() -> None:
    session = Session()
    session.become([Message("user", (1, 2))])
    assert session.become([Message("user", (1, 2, 3))]) == [Message("user", (3,))]
    assert session.become([user("12")]) == [user("12")]
    assert session.server.text == "<user>12"


def test_what_left_no_token_is_taken_back_with_what_came_before() -> None:
    """A rewind keeps every turn that ended there, and with it the text that it left without tokens."""
    session = Session()
    session.become([user("so th")], num_held=2)
    session.become([user("so the")], num_held=3)
    assert session.held.pieces[0].end == session.held.pieces[1].end
    assert session.become([user("so th"), assistant("Yes?")]) == [user("so th"), assistant("Yes?")]
    assert session.server.text == "<user>so th<assistant>Yes?"


_WORDS = st.text(alphabet="ab ", min_size=1, max_size=4)
_CONTENTS = st.one_of(_WORDS, st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple))
_MESSAGES = st.builds(Message, st.sampled_from(["user", "assistant"]), _CONTENTS)
_ANSWERS = st.lists(st.sampled_from(["a", "b", "ab", " a", ""]), max_size=3)


@dataclass(frozen=True)
class Edit:
    """What a client makes of a conversation: some messages stay, the last of them grows or shrinks, others follow."""

    num_kept: int
    num_cut: int
    growth: str
    more: Sequence[Message]
    num_held: int
    answer: Sequence[str] | None
    ends: bool

    def of(self, messages: Sequence[Message]) -> list[Message]:
        *kept, last = messages[: self.num_kept] or [user("a")]
        if isinstance(last.content, str):
            last = Message(last.role, last.content[: len(last.content) - self.num_cut] + self.growth or "a")
        return [*kept, last, *self.more]


_EDITS = st.builds(
    Edit,
    num_kept=st.integers(0, 4),
    num_cut=st.integers(0, 2),
    growth=st.text(alphabet="ab ", max_size=2),
    more=st.lists(_MESSAGES, max_size=2),
    num_held=st.integers(0, 3),
    answer=st.none() | _ANSWERS,
    ends=st.booleans(),
)


@given(st.lists(_EDITS, max_size=8))
def test_the_context_becomes_any_conversation(edits: list[Edit]) -> None:
    session, target = Session(), []
    for edit in edits:
        target = edit.of(target)
        session.become(target, edit.num_held)
        assert session.server.text == as_text(target)
        assert session.held.end == session.held.context_len == len(session.server)
        if edit.answer is not None:
            session.answer(*edit.answer, ends=edit.ends)
            target = [*target, assistant("".join(edit.answer))] if any(edit.answer) else target
