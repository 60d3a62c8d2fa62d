"""The text of a session that is cut back: what comes next is that of a session which was told no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from microturn.sessions.history import History
from support.text_edge import TextEdge

# Characters of two, three and four bytes, which are more tokens than characters, and one that is several characters.
ANSWER = "Grüße! 你好 ไทย 👩‍👩‍👧 naïve end"


@dataclass(frozen=True)
class Said:
    """A turn: text, perhaps in a message of another role, and then perhaps an answer of these ids."""

    text: str = ""
    role: str | None = None
    answer: Sequence[int] | None = None
    stop: Sequence[str] = ()


class Teller:
    """A history over a session's text, told in turns as the engine tells it."""

    def __init__(self, edge: TextEdge, turns: Sequence[Said] = ()) -> None:
        self.history = History(edge.open().text)
        self.answer_starts: list[int] = []
        for turn in turns:
            self.say(turn)

    @property
    def ids(self) -> list[int]:
        return self.history.context.token_ids

    def say(self, turn: Said) -> str:
        """Takes a turn; returns the text of its answer."""
        history, codec, start = self.history, self.history.codec, len(self.ids)
        generates = turn.answer is not None
        if turn.text or not generates:
            ids = codec.append_text(
                turn.text,
                role=turn.role,
                parse_special=False,
                flush=generates,
                last_token_id=history.context.last_token_id,
            )
        else:
            ids = codec.append_other(role=turn.role, last_token_id=history.context.last_token_id, input_follows=False)
        history.context.append_ids(ids)
        history.mark_input(start)
        self.answer_starts.append(len(self.ids))
        if turn.answer is None:
            return ""
        codec.begin_generation(turn.stop)
        text = ""
        for token_id in turn.answer:
            history.context.append_ids([token_id])
            text += codec.accept(token_id).text
        return text + codec.end_generation()


def ids_of(edge: TextEdge, text: str) -> list[int]:
    return edge.model.encoder.encode(text, begins=False)


def check_alike(one: Teller, other: Teller, edge: TextEdge) -> None:
    """Both are the same, and go on the same: with an answer, with text, with another message."""
    assert one.ids == other.ids
    assert one.history.codec.state == other.history.codec.state
    for turns in (
        [Said(answer=ids_of(edge, "ü你 so"))],
        [Said(" and on"), Said(" it goes", answer=ids_of(edge, " yes"))],
        [Said("what?", role="user"), Said(role="assistant", answer=ids_of(edge, "ไ!"))],
    ):
        checkpoints = [teller.history.checkpoint() for teller in (one, other)]
        for turn in turns:
            assert one.say(turn) == other.say(turn)
            assert one.ids == other.ids
        for teller, checkpoint in zip((one, other), checkpoints, strict=True):
            teller.history.roll_back(checkpoint)


@pytest.fixture
def smollm2(load_edge: Callable[[str], TextEdge]) -> TextEdge:
    return load_edge("smollm2")


# ---- within an answer ----------------------------------------------------------------------------------------------


def test_an_answer_is_cut_behind_any_token_and_within_any_character(smollm2: TextEdge) -> None:
    answer = ids_of(smollm2, ANSWER)
    chat = [Said("Hello the", role="user"), Said("re", role="user"), Said(role="assistant", answer=answer)]
    has_half = []
    for num_kept in range(len(answer) + 1):
        teller = Teller(smollm2, [*chat, Said("and then?", role="user"), Said(role="assistant", answer=answer)])
        teller.history.cut(teller.answer_starts[2] + num_kept)
        fresh = Teller(smollm2, [*chat[:2], Said(role="assistant", answer=answer[:num_kept])])
        has_half.append(bool(fresh.history.codec.state.output.partial_char))
        check_alike(teller, fresh, smollm2)
    assert any(has_half)
    assert not all(has_half)


def test_the_rest_of_an_answer_is_said_again_as_it_was(smollm2: TextEdge) -> None:
    """Half a character before the cut and half behind it are one."""
    answer = ids_of(smollm2, ANSWER)
    for num_kept in range(len(answer) + 1):
        teller = Teller(smollm2, [Said("Hello", role="user")])
        said = Teller(smollm2, [Said("Hello", role="user")]).say(Said(role="assistant", answer=answer[:num_kept]))
        assert teller.say(Said(role="assistant", answer=answer)) == ANSWER
        teller.history.cut(teller.answer_starts[-1] + num_kept)
        assert said + teller.say(Said(answer=answer[num_kept:])) == ANSWER


def test_half_a_character_before_the_cut_is_told_nobody_when_input_follows(smollm2: TextEdge) -> None:
    char = ids_of(smollm2, "ไ")
    assert len(char) > 1
    teller = Teller(
        smollm2, [Said("Hello", role="user"), Said(role="assistant", answer=[*ids_of(smollm2, "so"), *char])]
    )
    teller.history.cut(len(teller.ids) - 1)
    teller.say(Said("No, wait", role="user"))
    assert teller.say(Said(role="assistant", answer=ids_of(smollm2, "Yes"))) == "Yes"


def test_a_stop_string_of_the_answer_does_not_outlive_it(smollm2: TextEdge) -> None:
    """Text that was withheld as its beginning, and behind the cut is none, is not said again."""
    answer = ids_of(smollm2, "one two three four")
    teller = Teller(
        smollm2, [Said("Count", role="user"), Said(role="assistant", answer=answer, stop=["three four five"])]
    )
    teller.history.cut(len(teller.ids) - 1)
    assert teller.say(Said(answer=ids_of(smollm2, " three four five six"))) == " three four five six"


# ---- held text -----------------------------------------------------------------------------------------------------


def test_half_a_word_that_was_told_before_the_cut_goes_on(smollm2: TextEdge) -> None:
    teller = Teller(smollm2, [Said("so the fi")])
    at = len(teller.ids)
    teller.say(Said("rst thing", answer=ids_of(smollm2, " I")))
    teller.history.cut(at)
    teller.say(Said("nal thing", answer=()))
    assert teller.ids == smollm2.plain_ids("so the final thing")


def test_text_that_added_nothing_but_half_a_word_stands_before_a_cut_at_its_place(smollm2: TextEdge) -> None:
    """It has no position of its own; a client that cuts off an answer means the answer."""
    teller = Teller(smollm2, [Said("so the fi"), Said("na")])
    at = len(teller.ids)
    teller.say(Said("lly", answer=ids_of(smollm2, " I")))
    teller.history.cut(at)
    teller.say(Said("l thing", answer=()))
    assert teller.ids == smollm2.plain_ids("so the final thing")


def test_half_a_word_that_was_told_behind_the_cut_is_gone(smollm2: TextEdge) -> None:
    teller = Teller(smollm2, [Said("one two three fo")])
    teller.history.cut(2)
    teller.say(Said(" ten", answer=()))
    assert teller.ids == smollm2.plain_ids("one two ten")


def test_half_a_word_behind_an_answer_is_gone_with_a_part_of_the_answer(smollm2: TextEdge) -> None:
    answer = ids_of(smollm2, " I saw was")
    teller = Teller(smollm2, [Said("so the first thing", answer=answer), Said(" a bea")])
    end = teller.answer_starts[0]
    teller.history.cut(end + 2)
    check_alike(teller, Teller(smollm2, [Said("so the first thing", answer=answer[:2])]), smollm2)


# ---- messages ------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_cut_is_closed_as_any_other(smollm2: TextEdge) -> None:
    """Barge-in: what was heard of the answer is the whole answer, as the template writes it."""
    teller = Teller(
        smollm2,
        [Said("Hi", role="user"), Said(role="assistant", answer=ids_of(smollm2, "Well, there was once a king"))],
    )
    heard = ids_of(smollm2, "Well, there was")
    teller.history.cut(teller.answer_starts[1] + len(heard))
    teller.say(Said("Stop", role="user"))
    teller.say(Said(role="assistant", answer=()))
    assert teller.ids == smollm2.chat_ids([("user", "Hi"), ("assistant", "Well, there was"), ("user", "Stop")])


def test_the_message_that_was_open_at_the_cut_is_open_again(smollm2: TextEdge) -> None:
    teller = Teller(smollm2, [Said("Tell me of the ki", role="user")])
    at = len(teller.ids)
    teller.say(Said("ng of the", role="user"))
    teller.say(Said(role="assistant", answer=ids_of(smollm2, "Which one?")))
    teller.history.cut(at)
    teller.say(Said("nd queen", role="user"))
    teller.say(Said(role="assistant", answer=()))
    assert teller.ids == smollm2.chat_ids([("user", "Tell me of the kind queen")])


def test_a_message_that_is_cut_within_goes_on(smollm2: TextEdge) -> None:
    teller = Teller(smollm2, [Said("one two three four ", role="user"), Said(role="assistant", answer=[5])])
    whole = smollm2.chat_ids([("user", "one two three four")])
    at = whole.index(ids_of(smollm2, " three")[0])
    teller.history.cut(at)
    teller.say(Said(" ten", role="user"))
    teller.say(Said(role="assistant", answer=()))
    assert teller.ids == smollm2.chat_ids([("user", "one two ten")])


def test_a_history_that_is_cut_to_nothing_begins_with_bos_again(load_edge: Callable[[str], TextEdge]) -> None:
    edge = load_edge("gemma3")
    teller = Teller(edge, [Said("hello", role="user"), Said(role="assistant", answer=[100])])
    teller.history.cut(0)
    check_alike(teller, Teller(edge), edge)
    teller.say(Said("Hi", role="user"))
    teller.say(Said(role="assistant", answer=()))
    assert teller.ids == edge.chat_ids([("user", "Hi")])


# ---- any turns, any cut --------------------------------------------------------------------------------------------

texts = st.lists(st.sampled_from(["the", " fox", "\n", " ", "ü", "你好", "，", "ไทย", "👩‍👩‍👧", "12", "."]), max_size=5)
turns = st.builds(
    Said,
    text=texts.map("".join),
    role=st.just(None),
    answer=st.none() | st.lists(st.integers(3, 250), max_size=6),
    stop=st.sampled_from([(), ("a",), ("\n\n", "the end")]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(told=st.lists(turns, min_size=1, max_size=5), data=st.data())
def test_any_history_may_be_cut_behind_any_input_and_any_generated_token(
    edge: TextEdge, told: list[Said], data: st.DataObject
) -> None:
    # An answer to nothing is refused by the engine.
    assume(told[0].text or told[0].answer is None)
    teller = Teller(edge, told)
    last = data.draw(st.integers(0, len(told) - 1))
    answer = list(told[last].answer or ())
    position = data.draw(st.integers(0, len(answer))) + teller.answer_starts[last]
    # What stands there without tokens of its own is kept too.
    while last + 1 < len(told) and teller.answer_starts[last + 1] == position:
        last += 1
        answer = list(told[last].answer or ())
    num_kept = position - teller.answer_starts[last]
    kept = told[last] if told[last].answer is None else replace(told[last], answer=answer[:num_kept])
    teller.history.cut(position)
    fresh = Teller(edge, [*told[:last], kept])
    assert teller.ids == fresh.ids
    assert teller.history.codec.state == fresh.history.codec.state
