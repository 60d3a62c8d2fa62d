"""A server restores a session as it was some turns ago: it is told what it lacks, and each turn is still done once."""

import numpy as np
import pytest

from microturn_client import Resumed
from support.survival_scene import SavingScene, events, expected_of, ids, told

SAID = [([1, 2], 2, 0), ([3], 0, 0), ("a b", 3, 1), ([4], 2, 0), ([5, 6], 0, 0)]


@pytest.fixture
def scene():
    return SavingScene()


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
def test_a_session_that_is_behind_is_told_what_it_lacks(scene, num_kept):
    for number, said in enumerate(SAID):
        scene.say(*said)
        if number + 1 == num_kept:
            saved = scene.save()
    before = scene.context
    scene.fall_back_to(saved)
    scene.settle()
    assert scene.context == before
    assert not scene.was_opened_anew
    turn = scene.say([9], 3, 1)
    [resumed] = [event for event in events(turn) if isinstance(event, Resumed)]
    assert (resumed.same_tokens, resumed.same_numerics) == (True, False)
    assert f"behind by {len(before) - len(saved.context)} tokens, and was told them again, after:" in resumed.reason
    assert turn.ids == expected_of([*SAID, ([9], 3, 1)])[1][-1]
    assert scene.sessions._sessions[1].num_turns == turn.number + 1 == turn.result.turn + 1


@pytest.mark.parametrize("num_kept", [1, 4])
def test_a_turn_on_the_wire_is_answered_once(scene, num_kept):
    """It is refused for a gap, which says the number alone: an empty turn asks for the length."""
    for number, said in enumerate(SAID):
        scene.say(*said)
        if number + 1 == num_kept:
            saved = scene.save()
    turn = scene.begin([7], max_tokens=6, temperature=1.0)
    scene.begin([8], max_tokens=2)
    for step in (scene.deliver_up, scene.sessions.step, scene.sessions.step, scene.deliver_down):
        step()
    heard = events(turn)
    assert ids(heard)
    scene.fall_back_to(saved)
    scene.settle()
    assert scene.numbers[:2] == [5, None]
    assert scene.numbers[2:-2] == [None] * (turn.number - num_kept)
    assert scene.numbers[-2:] == [turn.number, turn.number + 1]
    assert not scene.was_opened_anew
    resumed, *rest, end = events(turn)
    assert (resumed.same_tokens, resumed.same_numerics) == (True, False)
    context, answers = expected_of([*SAID, ([7], 6, 1), ([8], 2, 0)])
    assert [*ids(heard), *ids(rest)] == answers[-2]
    assert end.status.finish_reason == "length"
    assert scene.context == context
    assert events(scene.say([9]))[-1].status.turn == turn.number + 2


@pytest.mark.parametrize("is_out", [False, True])
def test_one_that_is_not_behind_just_lives(scene, is_out):
    scene.say([1, 2], 2)
    saved = scene.save()
    if is_out:
        turn = scene.begin([3], max_tokens=2)
    scene.fall_back_to(saved)
    scene.settle()
    if not is_out:
        turn = scene.say([3], 2)
    resumed, *tokens, _ = events(turn)
    assert resumed.exact
    assert resumed.reason.startswith("the session lives")
    assert ids(tokens) == expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1][-1]
    assert len(scene.taken) == (1 if is_out else 2)


def test_turns_that_append_nothing_are_not_told(scene):
    """They have numbers: one that counts, and one that is empty."""
    scene.say([1, 2], 2)
    saved = scene.save()
    scene.say([5, 6], count_only=True)
    scene.say(None)
    scene.fall_back_to(saved)
    turn = scene.say([3], 2)
    resumed, *tokens, end = events(turn)
    assert resumed.exact
    assert end.status.turn == 1
    assert ids(tokens) == expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1][-1]


def test_it_may_fall_back_again_and_further(scene):
    copies = [scene.save() for said in SAID if scene.say(*said)]
    before = scene.context
    for number in (3, 1, 1, 0):
        scene.fall_back_to(copies[number])
        scene.settle()
        assert scene.context == before
        assert not scene.was_opened_anew
    last = scene.save()
    scene.say([7], 2)
    scene.fall_back_to(last)
    turn = scene.say([8], 2)
    assert scene.context == expected_of([*SAID, ([7], 2, 0), ([8], 2, 0)])[0]
    assert "behind by 3 tokens" in told(turn)[0].reason


class TestWhatItIsTold:
    def test_half_a_word_that_it_still_has_goes_on_as_text(self, scene):
        """Its ids would come behind the half word that the server holds, which would then be there twice."""
        scene.say("the fo")
        saved = scene.save()
        scene.say("x jumps", 2)
        scene.say([7], 1)
        scene.say("ov")
        before = scene.context
        scene.fall_back_to(saved)
        turn = scene.say("er", 2)
        assert told(turn)[0].same_tokens
        assert not scene.was_opened_anew
        assert scene.context[: len(before)] == before
        said = [("the fo", 0, 0), ("x jumps", 2, 0), ([7], 1, 0), ("ov", 0, 0), ("er", 2, 0)]
        assert turn.ids == expected_of(said)[1][-1]

    def test_half_a_word_that_it_lacks(self, scene):
        scene.say([1], 1)
        saved = scene.save()
        scene.say("ab")
        scene.fall_back_to(saved)
        turn = scene.say("c", 2)
        assert told(turn)[0].same_tokens
        assert scene.context == expected_of([([1], 1, 0), ("ab", 0, 0), ("c", 2, 0)])[0]

    def test_roles(self, scene):
        scene.say("hello ", role="user")
        saved = scene.save()
        scene.say("you ", role="user")
        scene.say(None, 3, role="assistant")
        before = scene.context
        scene.fall_back_to(saved)
        scene.settle()
        assert [said["role"].string_param for said in scene.taken if "role" in said] == ["user", "assistant"]
        assert scene.context == before

    def test_embeddings(self, scene):
        scene.say([1], 1)
        saved = scene.save()
        scene.say(np.ones((3, 4), np.float32), 2)
        before = scene.context
        scene.fall_back_to(saved)
        turn = scene.say([1], 1)
        assert told(turn)[0].same_tokens
        assert not scene.was_opened_anew
        assert scene.context[:-2] == before

    @pytest.mark.parametrize("heard_tokens", [0, 3, 6])
    def test_an_answer_as_far_as_it_was_heard(self, scene, heard_tokens):
        scene.say([1], 1)
        saved = scene.save()
        turn = scene.say([2, 3], 9)
        events(turn)
        scene.core.begin_interrupt(1e9, heard_tokens=heard_tokens)
        scene.settle()
        scene.say([4])
        before = scene.context
        assert before[2:] == [2, 3, *turn.ids[:heard_tokens], 4]
        scene.fall_back_to(saved)
        later = scene.say([5], 2)
        assert told(later)[0].same_tokens
        assert not scene.was_opened_anew
        assert scene.context == [*before, 5, *later.ids]

    def test_a_cut_on_the_wire_is_sent_again_behind_it(self, scene):
        scene.say([1], 1)
        saved = scene.save()
        turn = scene.say([2, 3], 6)
        events(turn)
        scene.begin([4], max_tokens=2)
        scene.core.begin_interrupt(1e9, heard_tokens=4)
        scene.flush()
        scene.fall_back_to(saved)
        scene.settle()
        assert not scene.was_opened_anew
        assert scene.context[2:] == [2, 3, *turn.ids[:4], 4]

    @pytest.mark.parametrize("rewinds", [False, True])
    def test_one_of_behind_a_cut(self, scene, rewinds):
        turn = scene.say([2, 3], 6)
        events(turn)
        if rewinds:
            scene.say([8], rewind_to=3)
        else:
            scene.core.begin_interrupt(1e9, heard_tokens=2)
            scene.settle()
        saved = scene.save()
        scene.say([4], 2)
        before = scene.context
        scene.fall_back_to(saved)
        scene.settle()
        assert not scene.was_opened_anew
        assert scene.context == before
