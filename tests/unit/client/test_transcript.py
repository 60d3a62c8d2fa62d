import numpy as np
import pytest

from microturn_client._events import Status, Timing, Usage
from microturn_client._inputs import encode_input
from microturn_client._replay import Replay
from microturn_client._transcript import EMBEDDING, Transcript


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
    assert transcript.ids() == [1, 2, 9, 9, 3, 4, 5, 8]
    assert transcript.is_replayable


@pytest.mark.parametrize("position", range(9))
def test_a_cut_keeps_what_is_before(transcript, position):
    transcript.cut(position)
    assert len(transcript) == position
    assert transcript.ids() == [1, 2, 9, 9, 3, 4, 5, 8][:position]


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
    assert told(transcript.as_ids()) == [transcript.ids()]


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
    by_ids = replay.by_ids()
    by_ids.has_told(encode_input([1]), transcript.ids())
    assert by_ids.is_right
    assert not by_ids.is_exact
    assert by_ids.by_ids() is None


def test_embeddings_are_kept_and_cut():
    transcript = Transcript(1 << 20)
    embeds = np.arange(12, dtype=np.float32).reshape(4, 3)
    transcript.add(encode_input(embeds), {}, status((6,), 5), [1], sampling={}, was_to_generate=True)
    assert transcript.ids() == [6, *[EMBEDDING] * 4, 1]
    transcript.cut(3)
    assert transcript.ids() == [6, EMBEDDING, EMBEDDING]
    ids, rows = transcript.as_ids()
    assert told([ids]) == [[6]]
    assert np.frombuffer(rows.tensor.data, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_it_has_a_bound():
    transcript = Transcript(max_bytes=100)
    for _ in range(10):
        transcript.add(encode_input([1, 2, 3]), {}, status((1, 2, 3), 3), [], sampling={}, was_to_generate=False)
    assert len(transcript) == 30
    assert not transcript.is_replayable
    assert len(transcript.behind(0)) == 4


def test_a_copy_is_independent(transcript):
    twin = transcript.copy()
    transcript.cut(0)
    assert len(twin) == 8
    assert twin.is_replayable
