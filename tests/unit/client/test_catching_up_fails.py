"""A session that was restored some turns behind and cannot catch up, or fails at it: each turn is still done once."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from microturn_client import FailedPrecondition, Recovery, Unavailable
from microturn_client.testing._messages import error
from support.survival_scene import SavingScene, Talk, events, expected_of, ids, told


@pytest.fixture
def scene():
    return SavingScene()


class TestWhatCannotCatchUp:
    """It is opened anew, as ever."""

    def test_one_of_before_a_cut(self, scene):
        turn = scene.say([2, 3], 6)
        events(turn)
        saved = scene.save()
        scene.core.begin_interrupt(1e9, heard_tokens=2)
        scene.settle()
        self.is_opened_anew(scene, saved)

    def test_one_of_before_a_rewind(self, scene):
        scene.say([1, 2])
        scene.say([3, 4])
        saved = scene.save()
        scene.say([5], rewind_to=3)
        self.is_opened_anew(scene, saved)

    def test_one_of_before_a_rewind_behind_which_as_much_was_said(self, scene):
        scene.say([1, 2])
        scene.say([3, 4])
        saved = scene.save()
        scene.say([5, 6], rewind_to=2)
        self.is_opened_anew(scene, saved)

    def test_one_of_another_length(self, scene):
        scene.say([1, 2], 1)
        saved = replace(scene.save(), context=[1, 2])
        scene.say([3])
        self.is_opened_anew(scene, saved)

    def test_one_that_has_gone_further(self, scene):
        scene.say([1, 2], 1)
        saved = replace(scene.save(), num_turns=4)
        saved.results.clear()
        scene.say([3])
        self.is_opened_anew(scene, saved)

    def is_opened_anew(self, scene, saved):
        before = scene.context
        scene.fall_back_to(saved)
        turn = scene.say([9], 2)
        assert "opened anew" in told(turn)[0].reason
        assert scene.was_opened_anew
        assert scene.context == [*before, 9, *turn.ids]

    @pytest.mark.parametrize("is_out", [False, True])
    def test_one_whose_transcript_is_forgotten(self, is_out):
        scene = SavingScene(Recovery(max_transcript_bytes=150))
        scene.say([1] * 10)
        saved = scene.save()
        scene.say([2] * 30)
        turn = scene.begin([3], max_tokens=1) if is_out else None
        scene.fall_back_to(saved)
        turn = turn or scene.say([3], 1)
        scene.settle()
        if is_out:
            with pytest.raises(FailedPrecondition, match="turn 1"):
                events(turn)
        else:
            assert "changed meanwhile" in told(turn)[0].reason


class TestFailures:
    @pytest.fixture
    def saved(self, scene):
        """Two requests tell what it lacks: the text, and the answer with all behind it."""
        scene.say([1, 2], 2)
        scene.save_first = scene.save()
        scene.say("a ")
        saved = scene.save()
        scene.say("b", 4, 1)
        scene.say([7], 3, 1)
        scene.say("c ")
        return saved

    EXPECTED = (([1, 2], 2, 0), ("a ", 0, 0), ("b", 4, 1), ([7], 3, 1), ("c ", 0, 0), ([9], 2, 1))

    def check(self, scene, turn):
        context, answers = expected_of(self.EXPECTED)
        assert ids(events(turn)) == answers[-1]
        assert scene.context == context

    @pytest.mark.parametrize("is_out", [False, True])
    def test_the_server_dies_and_the_next_is_behind_at_another_point(self, scene, saved, is_out):
        turn = scene.begin([9], max_tokens=2, temperature=1.0) if is_out else None
        scene.fall_back_to(saved)
        self.tell_one(scene)
        scene.fall_back_to(scene.save_first)
        turn = turn or scene.begin([9], max_tokens=2, temperature=1.0)
        scene.settle()
        assert not scene.was_opened_anew
        self.check(scene, turn)

    @pytest.mark.parametrize("is_out", [False, True])
    def test_the_stream_breaks_between(self, scene, saved, is_out):
        """The session has turns then that it got while catching up, and which have no place in the transcript."""
        turn = scene.begin([9], max_tokens=2, temperature=1.0) if is_out else None
        scene.fall_back_to(saved)
        self.tell_one(scene)
        scene.break_stream()
        turn = turn or scene.begin([9], max_tokens=2, temperature=1.0)
        scene.settle()
        assert scene.was_opened_anew
        self.check(scene, turn)

    @pytest.mark.parametrize(("num_told", "is_out"), [(1, True), (2, False)])
    def test_numbers_that_it_had_before_are_not_mistaken(self, scene, num_told, is_out):
        """One turn is told in two. So the session has the number of the turn on the wire though it lacks the answer
        before that, or the number and length of half a word that it lacks."""
        scene.say([1], 1)
        saved = scene.save()
        scene.say(np.ones((3, 4), np.float32), 2)
        if not is_out:
            scene.say("ab")
        before = scene.context
        turn = scene.begin([9], max_tokens=2) if is_out else None
        scene.fall_back_to(saved)
        self.tell_one(scene)
        for _ in range(num_told - 1):
            for step in (scene.deliver_down, scene.deliver_up, scene.sessions.step, scene.sessions.step):
                step()
        assert scene.sessions._sessions[1].num_turns == 1 + num_told
        scene.break_stream()
        scene.settle()
        turn = turn or scene.say([9], 2)
        assert scene.context == [*before, *(b"" if is_out else b"ab"), 9, *turn.ids]
        assert events(turn)[-1].status.context_len == len(scene.context)

    def tell_one(self, scene):
        while scene.core.lifecycle.state.value != "replaying":
            scene.deliver_up()
            scene.deliver_down()
            if not scene.up and not scene.down:
                scene.wait()
        scene.deliver_up()
        scene.sessions.step()
        assert scene.core.lifecycle.state.value == "replaying"

    @pytest.mark.parametrize("text", ["UNAVAILABLE: it stops", "INTERNAL: a fault", "NOT_FOUND: forgotten"])
    def test_a_failure_that_passes(self, scene, saved, text):
        scene.refuse_third(text)
        scene.fall_back_to(saved)
        self.check(scene, scene.say([9], 2, 1))

    @pytest.mark.parametrize("text", ["FAILED_PRECONDITION: no value", "INVALID_ARGUMENT: no", "CONTEXT_FULL: no"])
    def test_a_refusal_opens_it_anew(self, scene, saved, text):
        scene.refuse_third(text)
        scene.fall_back_to(saved)
        turn = scene.say([9], 2, 1)
        assert scene.was_opened_anew
        self.check(scene, turn)

    def test_what_comes_out_otherwise_opens_it_anew(self, scene, saved):
        scene.fall_back_to(saved)
        scene.sessions._sessions[1].context[0] = 8  # of the same length
        turn = scene.say([9], 2, 1)
        assert scene.was_opened_anew
        assert told(turn)[0].reason.startswith("the session was opened anew with")
        assert scene.context == expected_of(self.EXPECTED)[0]

    def test_a_server_that_never_lets_it_catch_up_is_given_up(self):
        scene = SavingScene(Recovery(give_up_after_s=3.0))
        scene.say([1, 2], 2)
        saved = scene.save()
        scene.say([3], 2)
        take = scene.sessions.take

        def refuse(message, send):
            if "resume" in message.parameters:
                take(message, send)
            else:
                send(error(message.id, "UNAVAILABLE: it stops"))

        scene.sessions.take = refuse
        turn = scene.begin([4], max_tokens=2)
        scene.fall_back_to(saved)
        scene.settle()
        with pytest.raises(Unavailable):
            events(turn)
        assert 3.0 <= scene.now_s < 10.0
        assert len(scene.taken) < 40

    def test_a_session_that_is_gone_then_is_opened_anew(self, scene, saved):
        scene.fall_back_to(saved)
        self.tell_one(scene)
        scene.kill()
        turn = scene.say([9], 2, 1)
        assert scene.was_opened_anew
        self.check(scene, turn)


class FallingTalk(Talk):
    """A talk whose server saves now and then; one that is killed goes on with one of the copies."""

    def __init__(self, chance):
        super().__init__(chance)
        self.scene = SavingScene()
        self.copies = []
        self.lineage = None

    def fail(self):
        """A copy of a session that was opened anew since, or went back to before the copy, is out of date."""
        now = self.scene.sessions._sessions.get(1)
        if now is None or self.chance.random() < 0.2:
            return super().fail()
        if now is not self.lineage:
            self.copies, self.lineage = [], now
        if not self.copies or self.chance.random() < 0.6:
            self.copies.append(self.scene.save())
            return None
        del self.copies[self.chance.randint(1, len(self.copies)) :]
        self.scene.fall_back_to(self.copies[-1])
        self.lineage = self.scene.sessions._sessions[1]
        return None


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_wherever_it_falls_back_to_every_turn_is_done_once(chance):
    talk = FallingTalk(chance)
    talk.run()
    talk.check_all_done_once()
