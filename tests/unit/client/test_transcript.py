import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from microturn_client._entries import EMBEDDING
from microturn_client._events import Status, Timing, Usage
from microturn_client._inputs import encode_input
from microturn_client._replay import Replay
from microturn_client._transcript import Transcript


def status(appended_ids, num_input, reason="append"):
    usage = Usage(num_input, 0, 0, 0)
    return Status(reason, None, 0, 0, 0, usage, Timing(0, 0, 0, 0, 0), 60.0, 1, appended_ids)


@pytest.fixture
def transcript():
    """ids 1 2 | 9 9, then the text of 3 4, of which nothing is held, then half a word, then 5 | 8."""
    transcript = Transcript(1 << 20)
    transcript.add(encode_input([1, 2]), {}, status((1, 2), 2), [9, 9], sampling={}, was_to_generate=True)
    transcript.add(encode_input("ab "), {}, status((3, 4), 2), [], sampling={}, was_to_generate=False)
    transcript.add(encode_input("c"), {}, status((), 0), [], sampling={}, was_to_generate=False)
    transcript.add(encode_input([5]), {}, status((5,), 1), [8], sampling={}, was_to_generate=True)
    return transcript


def told(pieces):
    return [np.frombuffer(piece.tensor.data, "<i4").tolist() for piece in pieces]


def test_it_is_as_long_as_the_context(transcript):
    assert len(transcript) == 8
    assert transcript.ids().tolist() == [1, 2, 9, 9, 3, 4, 5, 8]
    assert transcript.is_replayable


@pytest.mark.parametrize("position", range(9))
def test_a_cut_keeps_what_is_before(transcript, position):
    transcript.cut(position)
    assert len(transcript) == position
    assert transcript.ids().tolist() == [1, 2, 9, 9, 3, 4, 5, 8][:position]


def test_a_text_that_is_cut_in_two_is_known_by_its_ids_alone(transcript):
    transcript.cut(5)
    assert transcript.is_torn
    assert not Replay(transcript).is_exact


def test_a_turn_that_became_no_token_stays_where_nothing_before_it_was_cut(transcript):
    transcript.cut(6)
    assert [piece.tensor.name for piece in transcript.as_said()] == ["input_ids", "text_input", "text_input"]
    transcript.cut(4)
    assert told(transcript.as_said()) == [[1, 2]]


def test_what_a_cut_removes_is_told(transcript):
    assert [entry.start for entry in transcript.behind(4)] == [4, 6, 6]
    assert [entry.start for entry in transcript.behind(3)] == [4, 6, 6]
    assert [entry.start for entry in transcript.behind(6)] == [6]
    assert transcript.behind(8) == []


def test_ids_say_all_where_no_text_is_held_and_the_last_tokens_are_generated_again(transcript):
    [piece] = transcript.as_said()
    assert told([piece]) == [[1, 2, 9, 9, 3, 4, 5]]
    assert piece.options == {"max_tokens": 1, "ignore_eos": True}
    transcript.add(encode_input([6]), {}, status((6,), 1), range(10, 20), sampling={"seed": 1}, was_to_generate=True)
    [piece] = transcript.as_said()
    assert told([piece])[0][-7:] == [6, *range(10, 16)]
    assert piece.options == {"seed": 1, "max_tokens": 4, "ignore_eos": True}
    assert told(transcript.as_ids()) == [transcript.ids().tolist()]


def test_with_roles_all_is_said_again_as_it_was():
    transcript = Transcript(1 << 20)
    transcript.add(encode_input("hi"), {"role": "user"}, status((7, 1), 2), [], sampling={}, was_to_generate=False)
    transcript.add(
        encode_input(None), {"role": "assistant"}, status((8,), 1), [2, 3], sampling={}, was_to_generate=True
    )
    pieces = transcript.as_said()
    assert [piece.options.get("role") for piece in pieces] == ["user", "assistant", None]
    replay = Replay(transcript)
    for piece, appended, generated in zip(pieces, [(7,), (1, 8), ()], [(), (), (2, 3)], strict=True):
        assert not replay.is_right
        replay.has_told(piece.tensor, appended, generated)
    assert replay.is_exact


def test_a_replay_that_comes_out_otherwise_is_done_by_ids_and_not_exact(transcript):
    replay = Replay(transcript)
    replay.has_told(encode_input([1]), (1, 2, 9))
    assert not replay.is_right
    by_ids = replay.another
    by_ids.has_told(encode_input([1]), transcript.ids())
    assert by_ids.is_right
    assert not by_ids.is_exact
    assert by_ids.another is None


def test_embeddings_are_kept_and_cut():
    transcript = Transcript(1 << 20)
    embeds = np.arange(12, dtype=np.float32).reshape(4, 3)
    transcript.add(encode_input(embeds), {}, status((6,), 5), [1], sampling={}, was_to_generate=True)
    assert transcript.ids().tolist() == [6, *[EMBEDDING] * 4, 1]
    transcript.cut(3)
    assert transcript.ids().tolist() == [6, EMBEDDING, EMBEDDING]
    ids, rows = transcript.as_ids()
    assert told([ids]) == [[6]]
    assert np.frombuffer(rows.tensor.data, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_it_has_a_bound():
    transcript = Transcript(max_bytes=1000)
    for number in range(100):
        transcript.add(encode_input([1, 2, 3]), {}, status((1, 2, 3), 3), [], sampling={}, was_to_generate=False)
        assert number == 0 or transcript.behind(0), "the last turns may have to be said again behind a cut"
    assert len(transcript) == 300
    assert not transcript.is_replayable
    last = transcript.behind(0)
    assert 5 < len(last) < 20
    assert [entry.end for entry in last][-1] == 300
    transcript.cut(2)
    assert (len(transcript), transcript.behind(0)) == (2, [])
    assert not transcript.is_replayable


TEXTS = ["a", " word", "", " more"]


@pytest.mark.parametrize("said", [[5, 6, 7, 8], "four"])
def test_a_turn_on_the_beat_costs_little_more_than_its_ids_and_its_text(said):
    """An object for each turn was half a kilobyte, five times a second, for as long as the session lived."""
    transcript = Transcript(256 << 20)
    options = {"role": "user"} if isinstance(said, str) else {}

    def talk(num_turns):
        for _ in range(num_turns):
            turn_status = status((5, 6, 7, 8), 4)
            transcript.add(
                encode_input(said), dict(options), turn_status, [1, 2, 3, 4], TEXTS, sampling={}, was_to_generate=True
            )
            transcript.add_point(len(transcript) // 8)

    talk(100)
    tracemalloc.start()
    try:
        talk(5000)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_chars = len("".join(TEXTS))
    assert grown_bytes / 5000 < 4 * 8 + 8 + 25 + 4 * 4 + num_chars + 24 + 20
    assert transcript.is_replayable


def test_what_the_server_did_not_say_is_not_said_again():
    """With recovery=None nobody asks what a text became: a cut within it leaves what cannot be told."""
    transcript = Transcript()
    transcript.add(encode_input("a b c"), {}, status(None, 5), [8], sampling={}, was_to_generate=True)
    transcript.add(encode_input([4]), {}, status(None, 1), [], sampling={}, was_to_generate=False)
    assert not transcript.is_replayable
    assert [entry.tensor.name for entry in transcript.behind(0)] == ["text_input", "input_ids"]
    transcript.cut(3)
    assert len(transcript) == 3
    assert [entry.tensor.is_empty for entry in transcript.behind(0)] == [True]


TURN = st.one_of(
    st.builds(lambda ids: (ids, tuple(ids)), st.lists(st.integers(0, 9), max_size=3)),
    st.builds(
        lambda text, ids: (text, tuple(ids)), st.text("ab ", max_size=3), st.lists(st.integers(0, 9), max_size=3)
    ),
    st.builds(lambda num, ids: (np.ones((num, 2)), tuple(ids)), st.integers(1, 3), st.lists(st.just(7), max_size=2)),
)
ROLE = st.sampled_from([None, None, "user", "assistant"])
ANSWER = st.lists(st.integers(10, 19), max_size=3)


@given(st.lists(st.one_of(st.tuples(TURN, ROLE, ANSWER), st.integers(0, 40)), max_size=30))
def test_turns_come_out_as_they_went_in(acts):
    transcript = Transcript()
    turns = []  # (input, role, ids that it became, answer), whole ones only
    torn = 0
    for act in acts:
        if isinstance(act, int):
            transcript.cut(act)
            if act < torn:  # all that came behind the torn one is gone, turns without a token as well
                turns, torn = [], act
            while turns and torn + sum(len(became) + len(answer) for _, _, became, answer in turns) > act:
                turns.pop()
            whole = torn + sum(len(became) + len(answer) for _, _, became, answer in turns)
            if whole < len(transcript):  # a beginning of a turn is there: what came before is looked at no more
                turns, torn = [], len(transcript)
            continue
        (said, ids), role, answer = act
        num_embeds = len(said) if isinstance(said, np.ndarray) else 0
        transcript.add(
            encode_input(said),
            {"role": role} if role else {},
            status(ids, len(ids) + num_embeds),
            answer,
            sampling={},
            was_to_generate=bool(answer),
        )
        turns.append((said, role, [*ids, *[EMBEDDING] * num_embeds], answer))
    kept = list(transcript._entries)[len(transcript._entries) - len(turns) :]
    for entry, (said, role, became, answer) in zip(kept, turns, strict=True):
        assert entry.tensor == encode_input(said)
        assert entry.options == ({"role": role} if role else {})
        assert (entry.input_ids.tolist(), entry.output_ids.tolist()) == (became, answer)
    assert len(transcript) == len(transcript.ids())
    positions = range(len(transcript) + 1)
    assert all([entry.end > at for entry in transcript.behind(at)].count(False) == 0 for at in positions)


def test_a_copy_is_independent(transcript):
    twin = transcript.copy()
    transcript.cut(0)
    assert len(twin) == 8
    assert twin.is_replayable
