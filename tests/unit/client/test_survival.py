"""Whatever breaks, and whenever: each turn is done once, in its order, and its reader gets every token once.

A core and the sessions of the fake server, stepped by hand in any order, while streams break, the server dies, Triton
forgets the sequence, and readers leave; compared with turns that are simply done one after the other.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from microturn_client import (
    ConnectionLost,
    ContextFull,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    ModelChanged,
    NotFound,
    Recovery,
    ResourceExhausted,
    Resumed,
    SessionClosed,
    Tokens,
    TurnEnd,
    TurnTimeout,
    Unavailable,
)
from microturn_client._inputs import encode_input
from microturn_client._lifecycle import SessionState
from microturn_client._new_turn import begin_ask
from microturn_client._timeouts import Timeouts
from microturn_client.testing import FakeServer
from microturn_client.testing._messages import error
from support.survival_scene import BranchScene, SavingScene, Scene, Talk, events, expected_of, ids


def noted(server):
    """What a fake server is sent from now on."""
    taken, take = [], server._sessions.take
    server._sessions.take = lambda request, send: (taken.append(request), take(request, send))
    return taken


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_breaks_every_turn_is_done_once(chance):
    talk = Talk(chance)
    talk.run()
    talk.check_all_done_once()


@pytest.fixture
def scene():
    return Scene()


def test_a_session_that_lives_is_resumed(scene):
    turn = scene.begin([1, 2], max_tokens=6)
    for step in (scene.deliver_up, scene.sessions.step, scene.sessions.step, scene.deliver_down):
        step()
    first = events(turn)
    scene.break_stream()
    scene.settle()
    resumed, *tokens, end = events(turn)
    assert resumed.exact
    assert "the session lives" in resumed.reason
    assert [*ids(first), *ids(tokens)] == expected_of([([1, 2], 6, 0)])[1][0]
    assert end.status.usage.output_tokens == 6
    assert scene.sessions.num_turns_done == 1


def test_a_session_that_died_is_told_all_again(scene):
    for given_, num_tokens in (("the fo", 0), ("x ju", 4), ([7, 8], 0), ("mps", 0)):
        scene.begin(given_, max_tokens=num_tokens, temperature=1.0)
        scene.settle()
    before = scene.context
    scene.kill()
    turn = scene.begin(" over", max_tokens=5, temperature=1.0)
    scene.settle()
    resumed, *tokens, _ = events(turn)
    assert resumed.same_tokens
    assert "opened anew" in resumed.reason
    assert scene.context[: len(before)] == before
    said = [("the fo", 0, 1), ("x ju", 4, 1), ([7, 8], 0, 1), ("mps", 0, 1), (" over", 5, 1)]
    assert ids(tokens) == expected_of(said)[1][-1]


@pytest.mark.parametrize("num_tokens", [2, 6, 100])
def test_a_value_goes_on_in_a_session_that_died_inside_it(scene, num_tokens):
    """The last tokens of an answer are generated again: under its grammar, from where its value began."""
    grammar = {"json_schema": {"enum": ["first", "second"]}, "temperature": 1.0}
    first = scene.begin([1, 2], max_tokens=num_tokens, **grammar)
    scene.settle()
    heard, before = ids(events(first)), scene.context
    assert first.result.finish_reason == ("complete" if num_tokens == 100 else "length")
    scene.kill()
    goes_on = {**grammar, "grammar_from": 2} if num_tokens < 100 else {}
    turn = scene.begin(None, max_tokens=20, **goes_on)
    scene.settle()
    resumed, *tokens, end = events(turn)
    assert resumed.same_tokens
    assert scene.context[: len(before)] == before
    if num_tokens < 100:
        assert end.status.finish_reason == "complete"
        assert bytes([*heard, *ids(tokens)]) in (b'"first"', b'"second"')


def test_a_role_is_said_again(scene):
    scene.begin("hello", max_tokens=0, role="user")
    scene.begin(None, max_tokens=3, role="assistant")
    scene.settle()
    said = []
    take = scene.sessions.take
    scene.sessions.take = lambda message, send: (said.append(message), take(message, send))
    scene.begin([1], max_tokens=1)
    scene.kill()
    scene.settle()
    roles = [message.parameters["role"].string_param for message in said if "role" in message.parameters]
    assert roles == ["user", "assistant"]


def test_embeddings_are_said_again(scene):
    scene.begin(np.ones((3, 4), np.float32), max_tokens=2)
    scene.settle()
    before = scene.context
    scene.kill()
    turn = scene.begin([1], max_tokens=1)
    scene.settle()
    assert events(turn)[0].same_tokens
    assert scene.context[:5] == before


@pytest.mark.parametrize("said", [[1, 2, 3, 4, 5], "a b c "])
def test_with_a_window_no_turn_tells_more_than_the_server_has_taken_at_once(said):
    """All in one turn was CONTEXT_FULL behind a window, and the session lost."""
    server = FakeServer()
    taken = noted(server)
    with server.client() as client, client.session(overflow="window") as session:
        for _ in range(4):
            session.append(said)
        session.turn(None, max_tokens=3).wait()
        before = server.context_of(session.id)
        server.restart()
        taken.clear()
        [resumed] = session.append([9]).resumed
        assert resumed.same_tokens
        assert server.context_of(session.id) == [*before, 9]
        assert max(len(request.raw_input_contents[0]) for request in taken) <= 4 * 6


def test_what_holds_for_all_turns_of_a_session_disturbs_no_replay(wire):
    """It had the session's own deadline, which lost the session, and its stops, which changed the last tokens."""
    server = FakeServer()
    taken = noted(server)
    said = {"deadline_ms": 800, "stop": ["."], "stop_token_ids": [7], "min_tokens": 2}
    with server.client() as client, client.session(**said) as session:
        session.turn("a b", max_tokens=5).wait()
        session.append("c d", role="user")
        server.restart()
        taken.clear()
        session.append("e")
    *replay, later, _end = [[wire.option(request, name) for name in said] for request in taken]
    assert replay[-2:] == [[0, "[]", "[]", 0]] * 2
    assert later == [800, '["."]', "[7]", 2]


def test_no_turn_of_the_librarys_own_is_refused_for_a_deadline_of_the_session():
    """A question whether the session lives came too late, which was taken for a yes; what was said again was lost."""
    scene = SavingScene()
    events(scene.say([1], 6))
    scene.say([2])
    scene.core.begin_interrupt(1e9, heard_tokens=2)
    scene.settle()
    said_again = scene.taken[-1]
    scene.wait()
    scene.settle()
    keepalive = scene.taken[-1]
    assert [said["deadline_ms"].int64_param for said in (said_again, keepalive) if "deadline_ms" in said] == [0, 0]


def test_what_has_grown_too_long_is_not_replayed():
    scene = Scene(Recovery(max_transcript_bytes=40))
    scene.begin([1] * 20, max_tokens=0)
    scene.settle()
    scene.kill()
    turn = scene.begin([1], max_tokens=1)
    scene.settle()
    with pytest.raises(NotFound):
        turn.next_event()
    assert scene.core.lifecycle.state is SessionState.GONE


def test_what_was_said_to_one_model_is_not_told_to_another(scene):
    """Ids of one model are noise to another, and yet it would answer."""
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    branch = BranchScene(scene)
    scene.sessions.model_fingerprint = "another"
    scene.kill()
    turn = scene.begin([3], max_tokens=2)
    for one, waiting in ((scene, turn), (branch, branch.opening)):
        one.settle()
        with pytest.raises(ModelChanged, match="another model"):
            waiting.next_event()
        assert one.core.lifecycle.state is SessionState.GONE
        with pytest.raises(ModelChanged):
            one.begin([4])
    assert not scene.sessions._sessions


def test_a_server_that_stays_away_is_given_up_and_found_again():
    scene = Scene(Recovery(give_up_after_s=3.0))
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    scene.is_up = False
    scene.sessions.forget_sessions()
    turn = scene.begin([3], max_tokens=2)
    scene.settle()
    with pytest.raises(Unavailable):
        turn.next_event()
    assert scene.now_s >= 3.0
    scene.is_up = True
    later = scene.begin([4], max_tokens=2)
    scene.settle()
    assert ids(events(later)) == expected_of([([1, 2], 2, 0), ([4], 2, 0)])[1][-1]


def test_a_message_whose_answer_is_given_up_is_not_said_later(scene):
    """It was said as often as the program had tried again."""
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    before = scene.context
    scene.is_up = False
    scene.break_stream()
    for _ in range(2):
        answer = begin_ask(scene.core, encode_input("Pay!"), {}, Timeouts(1.0))
        scene.core.time_out(answer)
        with pytest.raises(TurnTimeout):
            answer.next_event()
    scene.is_up = True
    scene.settle()
    scene.begin([3], max_tokens=0)
    scene.settle()
    assert scene.context == [*before, 3]


def test_a_server_that_was_never_there_is_said_so_soon():
    scene = Scene(Recovery(give_up_opening_s=1.0))
    scene.is_up = False
    turn = scene.begin([1])
    scene.settle()
    with pytest.raises(ConnectionLost):
        turn.next_event()
    assert scene.now_s < 4.0
    with pytest.raises(ConnectionLost):
        scene.begin([1])


def test_a_server_that_drains_is_left_for_the_next(scene):
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    take, is_draining = scene.sessions.take, [True]

    def refuse(message, send):
        if is_draining:
            is_draining.pop()
            send(error(message.id, "UNAVAILABLE: the server is stopping"))
        else:
            take(message, send)

    scene.sessions.take = refuse
    turn = scene.begin([3], max_tokens=2)
    scene.settle()
    assert ids(events(turn)) == expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1][-1]


def test_a_session_of_another_past_is_not_gone_on_with(scene):
    """A server that has an older copy of a session: its turns would follow on another context."""
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    older = scene.sessions._sessions[1]
    scene.begin([3], max_tokens=2)
    scene.settle()
    older.num_turns, older.context = 1, older.context[:4]
    older.results.clear()
    scene.break_stream()
    turn = scene.begin([4], max_tokens=2)
    scene.settle()
    said = [([1, 2], 2, 0), ([3], 2, 0), ([4], 2, 0)]
    assert ids(events(turn)) == expected_of(said)[1][-1]
    assert scene.context == expected_of(said)[0]


def test_a_keepalive_that_nobody_answers_breaks_the_stream(scene):
    scene.begin([1], max_tokens=0)
    scene.settle()
    scene.wait()
    assert scene.up
    scene.up.clear()  # it goes to nowhere
    scene.wait()
    assert scene.core.lifecycle.state is SessionState.BROKEN
    scene.settle()
    assert scene.core.lifecycle.state is SessionState.OPEN


def test_the_client_numbers_turns_by_itself(scene):
    with pytest.raises(InvalidArgument, match="recovery=None"):
        scene.begin([1], turn=3)


def test_a_turn_at_which_the_server_fails_is_tried_once_more(scene):
    take, num_faults = scene.sessions.take, [2]

    def fail(message, send):
        if list(message.inputs[0].shape) == [1, 3] and num_faults[0]:
            num_faults[0] -= 1
            send(error(message.id, "INTERNAL: a fault"))
        else:
            take(message, send)

    scene.sessions.take = fail
    scene.begin([1], max_tokens=1)
    turn = scene.begin([1, 2, 3], max_tokens=2)
    num_faults[0] = 1
    scene.settle()
    assert len(ids(events(turn))) == 2
    num_faults[0] = 2
    turn = scene.begin([1, 2, 3], max_tokens=2)
    scene.settle()
    with pytest.raises(InternalError, match="a fault"):
        events(turn)
    assert len(scene.context) == 2 + 5


class TestSilence:
    """A stream that lives and says nothing: a model process that died in a Triton that nobody supervises, a proxy that
    has not noticed that its server is gone. Clients waited for ever, since what is behind an answer that its reader has
    left, or behind the attempt to go on with a session, was not sent before that was answered."""

    @pytest.mark.parametrize("num_tokens", [0, 3])
    def test_a_turn_without_an_answer_is_asked_for_again(self, scene, num_tokens):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        turn = scene.begin([3], max_tokens=num_tokens)
        scene.go_mute()
        scene.settle()
        assert ids(events(turn)) == expected_of([([1, 2], 2, 0), ([3], num_tokens, 0)])[1][-1]
        assert scene.sessions.num_turns_done == 2

    def test_an_answer_that_was_lost_is_told_again(self, scene):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        turn = scene.begin([3], max_tokens=4)
        for step in (scene.deliver_up, scene.sessions.step, scene.sessions.step, scene.deliver_down):
            step()
        heard = ids(events(turn))
        scene.sessions.step()
        scene.go_mute()
        scene.settle()
        assert heard + ids(events(turn)) == expected_of([([1, 2], 2, 0), ([3], 4, 0)])[1][-1]
        assert scene.sessions.num_turns_done == 2

    def test_an_answer_that_is_overtaken_is_lost(self, scene):
        """The turns behind it were written down in its place."""
        turns = [scene.begin([number], max_tokens=2) for number in range(3)]
        scene.deliver_up()
        scene.sessions.step()
        scene.deliver_down()
        scene.lose_answer(scene.up[0].id)
        began_s = scene.now_s
        scene.settle()
        assert scene.now_s < began_s + 1.0
        said = [([number], 2, 0) for number in range(3)]
        assert [ids(events(turn)) for turn in turns] == expected_of(said)[1]
        assert scene.sessions.num_turns_done == 3
        scene.kill()
        scene.wait()
        scene.settle()
        assert scene.context == expected_of(said)[0]

    def test_a_turn_that_was_given_up_holds_nobody_up(self, scene):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        late = scene.begin([3], max_tokens=4)
        scene.go_mute()
        scene.core.time_out(late)
        turn = scene.begin([4], max_tokens=2)
        scene.settle()
        assert len(ids(events(turn))) == 2
        assert scene.context[:6] == [*expected_of([([1, 2], 2, 0)])[0], 3, 4]

    def test_start_is_asked_for_again(self, scene):
        turn = scene.begin([1, 2], max_tokens=2)
        scene.go_mute()
        scene.settle()
        assert ids(events(turn)) == expected_of([([1, 2], 2, 0)])[1][-1]
        assert scene.sessions.num_turns_done == 1

    @pytest.mark.parametrize("fail", [Scene.break_stream, Scene.kill])
    def test_each_attempt_to_go_on_may_be_lost(self, scene, fail):
        """The first attempts, where the session lives; what it is told, where it is opened anew."""
        scene.begin("a b", max_tokens=2, role="assistant")
        scene.begin([3], max_tokens=2)
        scene.settle()
        fail(scene)
        turn = scene.begin([4], max_tokens=2)
        for num_passed in range(5):
            for _ in range(num_passed):
                scene.deliver_up()
                scene.deliver_down()
            while scene.core.lifecycle.state is SessionState.BROKEN:
                scene.wait()
            scene.go_mute()
            scene.wait()
            assert not scene.is_mute, "it waits for ever"
        scene.settle()
        said = [("a b", 2, 0), ([3], 2, 0), ([4], 2, 0)]
        assert ids(events(turn)) == expected_of(said)[1][-1]
        assert scene.context == expected_of(said)[0]

    def test_a_server_that_is_slow_is_not_taken_for_lost(self):
        """An hour before each token: the turns are done once, and their readers hear of nothing but the answers."""
        scene = Scene(Recovery(give_up_after_s=1.0, give_up_opening_s=1.0))
        turns = [scene.begin([1, 2], max_tokens=2), scene.begin([3], max_tokens=2)]
        num_streams = 0
        for hour in range(1, 5):
            while scene.now_s < hour * 3600.0:
                num_streams += scene.core.lifecycle.state is SessionState.BROKEN
                scene.deliver_up()
                scene.deliver_down()
                scene.wait()
            scene.sessions.step()
        scene.settle()
        for turn, answer in zip(turns, expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1], strict=True):
            *tokens, end = events(turn)
            assert all(isinstance(event, Tokens) for event in tokens)
            assert ids(tokens) == answer
            assert end.status.finish_reason == "length"
        assert scene.sessions.num_turns_done == 2
        assert num_streams <= 4 * 9  # 10 s and more, doubled


class TestRoom:
    """Turns that wait behind a running one are bounded on the server, and its client waits for room."""

    @pytest.mark.parametrize("max_queued_turns", [1, 3, 8])
    def test_a_full_queue_leaves_no_hole(self, scene, max_queued_turns):
        """The ninth of twenty turns was refused, and those behind it were appended all the same."""
        scene.sessions.max_queued_turns = max_queued_turns
        turns = [scene.begin([number], max_tokens=2) for number in range(20)]
        scene.settle()
        context, answers = expected_of([([number], 2, 0) for number in range(20)])
        assert [ids(events(turn)) for turn in turns] == answers
        assert scene.context == context

    def test_it_asks_again_when_the_server_said(self, scene):
        scene.sessions.max_queued_turns = 1
        scene.begin([1], max_tokens=0)
        scene.settle()
        for number in range(3):
            scene.begin([number], max_tokens=50)
        for _ in range(3):
            scene.deliver_up()
        while scene.down:
            scene.deliver_down()
        assert scene.core.outbox.retry_at == pytest.approx(scene.now_s + 0.02)  # what the fake server says
        assert scene.core.wake_at == scene.core.outbox.retry_at
        assert not scene.up
        scene.wait()
        assert len(scene.up) == 1

    def test_what_finds_no_room_is_not_sent_behind_end(self, scene):
        """It opened the session once more, for a program that had closed it."""
        scene.sessions.max_queued_turns = 1
        scene.begin([1], max_tokens=0)
        scene.settle()
        turns = [scene.begin([number], max_tokens=50) for number in range(4)]
        for _ in range(4):
            scene.deliver_up()
        end = scene.core.begin_close(5.0)
        scene.flush()
        while scene.down:
            scene.deliver_down()
        scene.now_s += 1.0
        scene.core.tick()
        scene.flush()
        assert len(scene.up) == 1, "END, and nothing behind it"
        scene.settle()
        assert events(end)[-1].status.finish_reason == "closed"
        for turn in turns[:2]:  # the one that ran, and the one that waited
            assert events(turn)[-1].status.finish_reason == "interrupted"
        for turn in turns[2:]:
            with pytest.raises(SessionClosed):
                events(turn)

    def test_an_interrupt_does_not_wait_for_room(self, scene):
        scene.sessions.max_queued_turns = 1
        scene.begin([1, 2], max_tokens=0)
        scene.settle()
        turns = [scene.begin([number], max_tokens=50) for number in range(4)]
        for _ in range(4):
            scene.deliver_up()
        while scene.down:
            scene.deliver_down()
        cut = scene.core.begin_interrupt(1e9, at=2)
        scene.settle()
        assert events(cut)[-1].status.context_len == 2
        assert [events(turn)[-1].status.finish_reason for turn in turns] == ["interrupted"] * 4
        assert scene.context == [1, 2, 0, 1, 2, 3]

    def test_who_waits_too_long_for_room_is_told_of_it(self, scene):
        scene.sessions.max_queued_turns = 1
        scene.begin([1], max_tokens=0)
        scene.settle()
        for number in range(3):
            last = scene.begin([number], max_tokens=50)
        for _ in range(3):
            scene.deliver_up()
        while scene.down:
            scene.deliver_down()
        scene.core.time_out(last)
        with pytest.raises(ResourceExhausted):
            last.next_event()

    def test_without_numbers_none_is_overtaken(self):
        scene = Scene(recovery=None)
        scene.sessions.max_queued_turns = 1
        turns = [scene.begin([number], max_tokens=2) for number in range(20)]
        scene.settle()
        context, answers = expected_of([([number], 2, 0) for number in range(20)])
        assert [ids(events(turn)) for turn in turns] == answers
        assert scene.context == context


class TestNews:
    """What befell the session is told to whoever asks first, whatever is asked."""

    def lose(self, scene):
        """The server computes the KV anew from what the window shows."""
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        scene.sessions.rebuild()

    @pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": 0, "rewind_to": 1}])
    def test_a_call_that_returns_a_status_says_it(self, scene, options):
        self.lose(scene)
        turn = scene.begin([3], **options)
        scene.settle()
        [told] = events(turn)[-1].status.resumed
        assert not told.exact
        assert list(scene.core.news.past) == [told]

    def test_a_keepalive_that_finds_out_says_it_at_once_and_with_the_next_turn(self, scene):
        self.lose(scene)
        scene.wait()  # the keep-alive is due
        scene.settle()
        [told] = scene.core.news.past
        assert not told.same_tokens
        assert scene.core.news.take_uncalled() == [told]
        assert scene.core.news.take_uncalled() == []
        turn, later = scene.begin([3], max_tokens=0), scene.begin([4], max_tokens=0)
        scene.settle()
        assert events(turn)[-1].status.resumed == (told,)
        assert events(later)[-1].status.resumed == ()

    def test_an_interrupt_says_it(self, scene):
        self.lose(scene)
        scene.wait()
        scene.settle()
        cut = scene.core.begin_interrupt(1e9, at=2)
        scene.settle()
        assert len(events(cut)[-1].status.resumed) == 1

    def test_tokens_and_numerics_are_told_apart(self, scene):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        scene.break_stream()
        turn = scene.begin([3], max_tokens=1)
        scene.settle()
        lives = events(turn)[0]
        assert (lives.same_tokens, lives.same_numerics, lives.exact) == (True, True, True)
        scene.kill()
        turn = scene.begin([3], max_tokens=1)
        scene.settle()
        anew = events(turn)[0]
        assert (anew.same_tokens, anew.same_numerics, anew.exact) == (True, False, False)


class TestBargeIn:
    def test_it_survives_whatever_breaks(self, scene):
        """A talk over an answer whose server dies before the cut is confirmed."""
        turn = scene.begin([1, 2], max_tokens=50)
        for _ in range(40):
            scene.deliver_up()
            scene.sessions.step()
            scene.deliver_down()
        heard = ids([turn.next_event() for _ in range(10)])
        later = scene.begin([3], max_tokens=2)
        cut = scene.core.begin_interrupt(1e9, heard_tokens=4)
        scene.flush()
        scene.kill()
        scene.settle()
        assert events(cut)[-1].status.context_len == 2 + 4
        assert events(later)[-1].status.finish_reason == "interrupted"
        assert scene.context == [1, 2, *heard[:4], 3]

    def test_the_position_of_text(self, scene):
        turn = scene.begin([1], max_tokens=8)
        scene.settle()
        happened = events(turn)
        text = "".join(event.text for event in happened if isinstance(event, Tokens))
        with pytest.raises(InvalidArgument, match="not how the answer begins"):
            scene.core.begin_interrupt(1e9, heard_text=text + "?")
        cut = scene.core.begin_interrupt(1e9, heard_text=text[:5])
        scene.settle()
        assert events(cut)[-1].status.context_len == 1 + 5
        cut = scene.core.begin_interrupt(1e9, heard_chars=3)
        scene.settle()
        assert events(cut)[-1].status.context_len == 1 + 3
        cut = scene.core.begin_interrupt(1e9, at=2)
        scene.settle()
        assert scene.context == [1, *ids(happened)[:1]]

    def test_a_turn_that_interrupts_by_itself_is_written_down_as_the_server_does_it(self, scene):
        """Victims, what waited behind them, and the cut, as users of ``on_overlap`` and ``rewind_to`` have them."""
        turn = scene.begin([1, 2], max_tokens=50)
        for _ in range(20):
            scene.deliver_up()
            scene.sessions.step()
            scene.deliver_down()
        scene.begin([3], max_tokens=0)
        scene.begin([4], max_tokens=2, on_overlap="interrupt", rewind_to=5)
        scene.settle()
        before = scene.context
        scene.kill()
        last = scene.begin([9], max_tokens=1)
        scene.settle()
        assert scene.context[: len(before)] == before
        assert events(last)[0].same_tokens
        assert events(turn)[-1].status.finish_reason == "interrupted"

    def test_a_cut_that_is_refused_leaves_all_as_it_was(self, scene):
        turn = scene.begin([1, 2], max_tokens=3)
        scene.settle()
        answer = ids(events(turn))
        take = scene.sessions.take

        def refuse(message, send):
            if "rewind_to" in message.parameters:
                send(error(message.id, "FAILED_PRECONDITION: evicted [position=99]"))
            else:
                take(message, send)

        scene.sessions.take = refuse
        later = scene.begin([3], max_tokens=2)
        cut = scene.core.begin_interrupt(1e9, heard_tokens=1)
        scene.settle()
        with pytest.raises(FailedPrecondition):
            cut.next_event()
        assert len(ids(events(later))) == 2
        assert scene.context[:6] == [1, 2, *answer, 3]

    def test_a_cut_that_is_refused_for_a_gap_is_sent_again(self, scene):
        """A turn before the cut was refused. The cut came back as a gap, and from then on waited for
        its own answer: nothing was sent any more, and the timer of the keep-alive span."""
        scene.begin([1, 2], max_tokens=0)
        scene.settle()
        take, is_full = scene.sessions.take, [True]

        def refuse(message, send):
            if list(message.inputs[0].shape) == [1, 3] and is_full.pop():
                send(error(message.id, "CONTEXT_FULL: send less"))
            else:
                take(message, send)

        scene.sessions.take = refuse
        scene.begin([3], max_tokens=2)
        full = scene.begin([4, 5, 6], max_tokens=0)
        behind = scene.begin([7], max_tokens=0)
        cut = scene.core.begin_interrupt(1e9, at=2)
        scene.settle()
        assert events(cut)[-1].status.context_len == 2
        with pytest.raises(ContextFull):
            events(full)
        assert events(behind)[-1].status.context_len == 4
        assert scene.context == [1, 2, 3, 7]

    def test_what_comes_behind_a_cut_after_a_gap_is_not_held_for_it(self, scene):
        """The interrupt was refused for a gap before the turn that it would have undone was. So that one was sent again
        behind it, as a turn that waits for the interrupt's answer, which had come: its reader waited for ever."""
        scene.begin([1, 2], max_tokens=0)
        scene.settle()
        take, held_back = scene.sessions.take, []

        def refuse(message, send):
            if list(message.inputs[0].shape) == [1, 3]:
                held_back.append(lambda: send(error(message.id, "CONTEXT_FULL: send less")))
            elif held_back and "rewind_to" not in message.parameters:
                held_back.append(lambda: send(error(message.id, "FAILED_PRECONDITION: a gap [turn=1]")))
            elif held_back:
                send(error(message.id, "FAILED_PRECONDITION: a gap [turn=1]"))
                for tell in held_back:
                    tell()
                scene.sessions.take = take
            else:
                take(message, send)

        scene.sessions.take = refuse
        scene.begin([3, 4, 5], max_tokens=2)
        behind = scene.begin([7], max_tokens=0)
        scene.core.begin_interrupt(1e9, at=2)
        scene.settle()
        assert events(behind)[-1].status.context_len == 3
        assert scene.context == [1, 2, 7]

    def test_what_is_held_for_a_cut_ends_with_the_session(self, scene):
        """A turn ended while an interrupt on its way might undo it, and the session was closed and its stream lost: its
        reader waited for ever, since it was neither on the wire nor undone."""
        scene.begin([1, 2], max_tokens=0)
        scene.settle()
        turn = scene.begin([3, 4], max_tokens=0)
        scene.core.begin_interrupt(1e9, at=2)
        scene.flush()
        scene.deliver_up()
        scene.sessions.step()
        scene.deliver_down()
        scene.core.begin_close(1e9)
        scene.break_stream()
        assert turn.is_over
        assert events(turn)[-1].status.finish_reason == "append"

    def test_a_position_that_nobody_can_have_heard_is_refused(self, scene):
        """It cut through an input on the wire, and what the server kept of that was said again with the rest of it."""
        first = scene.begin([1, 2], max_tokens=2)
        scene.settle()
        answer = ids(events(first))
        later = scene.begin([3, 4, 5], max_tokens=0)
        with pytest.raises(InvalidArgument, match="at=6"):
            scene.core.begin_interrupt(1e9, at=6)
        scene.settle()
        assert events(later)[-1].status.context_len == 7
        assert scene.context == [1, 2, *answer, 3, 4, 5]

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_text_whose_special_tokens_do_not_count_is_said_again_as_such(self, wire, is_lost):
        """In a session whose texts have special tokens, those that a user had written counted the second time."""
        server = FakeServer()
        taken = noted(server)
        with server.client() as client, client.session(parse_special=True) as session:
            session.turn("<|user|>", max_tokens=4).wait()
            session.append("<|system|> ", parse_special=False, role="user")
            taken.clear()
            if is_lost:
                server.restart()
            else:
                session.interrupt(heard_tokens=2)
            session.append("<|user|>")
            assert [
                wire.option(request, "parse_special")
                for request in taken
                if b"<|system|>" in request.raw_input_contents[0]
            ] == [False]

    @pytest.mark.parametrize("nothing", [{"heard_tokens": 0}, {"heard_chars": 0}, {"heard_text": " "}])
    @pytest.mark.parametrize("num_steps", [0, 3, 9])
    def test_nothing_heard_of_the_last_answer_leaves_those_before_it(self, scene, nothing, num_steps):
        """Before its first token was handed out the answer before it was taken for the last, and cut away."""
        first = scene.begin([1, 2], max_tokens=4)
        scene.settle()
        answer = ids(events(first))
        last = scene.begin([3], max_tokens=9)
        for _ in range(num_steps):
            for step in (scene.deliver_up, scene.sessions.step, scene.deliver_down):
                step()
        for _ in range(2):
            scene.core.begin_interrupt(1e9, **nothing)
        scene.settle()
        assert ids(events(last)) == []
        assert scene.context == [1, 2, *answer, 3]

    @pytest.mark.parametrize("recovery", [Recovery(), None])
    def test_one_of_a_session_that_was_attached_cuts_nothing_away(self, recovery):
        """Its length was not known yet, and taken for nothing."""
        server = FakeServer(token_s=0.02)
        with server.client() as client, client.session() as session:
            session.turn([1, 2], max_tokens=4).wait()
            before = server.context_of(session.id)
            with server.client(recovery=recovery) as other, other.attach(session.token) as attached:
                assert attached.interrupt().context_len == attached.interrupt().context_len == 6
                assert attached.append([3]).context_len == 7
                assert server.context_of(session.id) == [*before, 3]

    def test_one_behind_the_first_turn_of_a_session_that_was_attached_says_nothing_twice(self):
        """Without a recovery that turn is on the wire by then, in front of a cut whose place nobody knows."""
        server = FakeServer(token_s=0.02)
        with server.client() as client, client.session() as session:
            session.turn([1, 2], max_tokens=4).wait()
            before = server.context_of(session.id)
            with server.client(recovery=None) as other, other.attach(session.token) as attached:
                turn = attached.turn([3], max_tokens=50)
                num_tokens = attached.interrupt().context_len - len(before) - 1
                assert turn.collect().status.finish_reason == "interrupted"
                assert attached.append([4]).context_len == len(before) + 1 + num_tokens + 1
                assert server.context_of(session.id)[len(before) + num_tokens + 1 :] == [4]
                assert attached.transcript[-1].position == len(before) + 1 + num_tokens

    @pytest.mark.parametrize("has_died", [False, True])
    @pytest.mark.parametrize("gives_up", [False, True])
    def test_one_whose_time_passes_while_no_server_is_there_is_done_later(self, has_died, gives_up):
        """It was withdrawn, and the turns that were held for it were so for ever, and missing in the transcript."""
        scene = Scene(Recovery(give_up_after_s=3.0))
        scene.begin([1], max_tokens=0)
        scene.settle()
        answer, later = scene.begin([2], max_tokens=40), scene.begin([3], max_tokens=5)
        for _ in range(9):
            for step in (scene.deliver_up, scene.sessions.step, scene.deliver_down):
                step()
        heard = ids([answer.next_event()])
        scene.is_up = False
        if has_died:
            scene.sessions.forget_sessions()
        scene.break_stream()
        cut = scene.core.begin_interrupt(1.0)
        if gives_up:
            scene.settle()
        else:
            scene.core.time_out(cut)
        for turn in (cut, answer, later) if gives_up else (cut,):
            with pytest.raises(ConnectionLost if gives_up else TurnTimeout):
                events(turn)
        scene.is_up = True
        last = scene.begin([4], max_tokens=3)
        scene.settle()
        if not gives_up:
            assert isinstance(events(answer)[-1], TurnEnd)
            assert events(later)[-1].status.finish_reason == "interrupted"
        assert len(ids(events(last))) == 3
        assert scene.context == [1, 2, *heard, *([] if has_died and gives_up else [3]), 4, *last.ids]
        assert scene.core.transcript.is_replayable
        assert len(scene.core.transcript) == len(scene.context)

    def test_whose_end_is_held_for_one_is_told_when_the_time_has_passed(self, scene):
        """It was told that the end had been handed out before."""
        answer, later = scene.begin([1, 2], max_tokens=4), scene.begin([3], max_tokens=5)
        for step in (scene.deliver_up, scene.sessions.step, scene.deliver_down, scene.deliver_up):
            step()
        assert ids([answer.next_event()])
        scene.core.begin_interrupt(1e9)
        scene.flush()
        while scene.sessions.is_busy:
            scene.sessions.step()
        while scene.down:
            scene.deliver_down()
        assert later.result is not None
        scene.core.time_out(later)
        with pytest.raises(TurnTimeout):
            events(later)

    def test_what_was_told_anew_is_no_answer_that_waits_to_be_read(self, scene):
        """A session is opened anew by generating the end of its last answer again. Nobody reads that, so an interrupt
        that said nothing cut there: what had been heard before the loss and since was gone."""
        first = scene.begin([1, 2], max_tokens=4)
        scene.settle()
        before = [1, 2, *ids(events(first))]
        scene.kill()
        turn = scene.begin([7], max_tokens=50)
        for _ in range(20):
            if scene.core.lifecycle.state is SessionState.BROKEN:
                scene.wait()
            scene.deliver_up()
            scene.sessions.step()
            scene.deliver_down()
        heard = ids(events(turn))
        assert heard
        cut = scene.core.begin_interrupt(1e9)
        scene.settle()
        assert scene.context == [*before, 7, *heard]
        assert events(cut)[-1].status.context_len == len(scene.context)

    def test_the_first_turn_that_is_said_again_does_not_open_the_session_again(self, scene):
        """The first turn, which was START, was undone by an interrupt and said again. When the stream broke, it was
        sent as START once more: under its new number that was other content, and its input was lost."""
        scene.begin([1, 2], max_tokens=50)
        scene.deliver_up()
        scene.sessions.step()
        scene.deliver_down()
        scene.core.begin_interrupt(1e9, at=0)
        scene.flush()
        for _ in range(20):
            scene.deliver_up()
            scene.sessions.step()
            if not scene.core.outbox.sent[-1].is_cut:  # it is said again
                break
            scene.deliver_down()
        scene.deliver_up()
        scene.break_stream()
        scene.settle()
        assert scene.context == [1, 2]
        assert list(scene.core.transcript.ids()) == [1, 2]

    def test_one_that_comes_before_another_is_confirmed_cuts_no_further_on(self, scene):
        """The second cut at the end of what had been there before the first. So it kept the inputs that were said again
        after the first, and they were said once more, in silence."""
        turn = scene.begin([1, 2], max_tokens=2)
        scene.begin([3, 4], max_tokens=0)
        scene.begin([5, 6, 7], max_tokens=0)
        scene.settle()
        answer = ids(events(turn))
        scene.core.begin_interrupt(1e9, heard_tokens=1)
        scene.flush()
        second = scene.core.begin_interrupt(1e9)
        scene.settle()
        assert events(second)[-1].status.context_len == 3
        assert scene.context == [1, 2, answer[0], 3, 4, 5, 6, 7]
        assert scene.context == list(scene.core.transcript.ids())

    def test_one_that_overtakes_another_that_waits_takes_it_along(self, scene):
        """While a first interrupt is on its way, others wait; the last of them is sent before the others, and they cut
        further on than it did, through the inputs that were said again after it."""
        turn = scene.begin([1, 2], max_tokens=4)
        scene.begin([3, 4], max_tokens=0)
        scene.begin([5, 6, 7], max_tokens=0)
        scene.settle()
        answer = ids(events(turn))
        scene.core.begin_interrupt(1e9, heard_tokens=4)
        scene.flush()
        scene.core.begin_interrupt(1e9, heard_tokens=3)
        scene.flush()
        last = scene.core.begin_interrupt(1e9, heard_tokens=1)
        scene.settle()
        assert events(last)[-1].status.context_len == 3
        assert scene.context == [1, 2, answer[0], 3, 4, 5, 6, 7]
        assert scene.context == list(scene.core.transcript.ids())


def test_a_branch_whose_parent_died_is_told_all(scene):
    scene.begin([1, 2], max_tokens=3)
    scene.settle()
    before = scene.context
    branch = BranchScene(scene)
    scene.kill()
    branch.settle()
    assert events(branch.opening)[-1].status.context_len == 5
    turn = branch.begin([7], max_tokens=1)
    branch.settle()
    assert scene.sessions.context_of(2)[:6] == [*before, 7]
    assert len(ids(events(turn))) == 1


def test_a_keepalive_finds_out_that_triton_has_ended_the_sequence(scene):
    turn = scene.begin([1, 2], max_tokens=2)
    scene.settle()
    answer = ids(events(turn))
    scene.sessions.forget_sequences()
    scene.wait()  # the keep-alive is due
    scene.settle()
    again = scene.begin([3], max_tokens=2)
    scene.settle()
    told, *rest = events(again)
    assert isinstance(told, Resumed)
    assert told.exact
    assert ids(rest) == expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1][1]
    assert scene.context == [1, 2, *answer, 3, *ids(rest)]


class TestAnEndThatTritonRefuses:
    """It had ended the sequence before, as at a stranger's END; the session kept its place until its idle time."""

    def close(self, scene):
        end = scene.core.begin_close(1e9)
        scene.settle()
        return end

    def test_the_session_is_closed_all_the_same(self, scene):
        turn = scene.begin([1, 2], max_tokens=2)
        scene.settle()
        scene.sessions.forget_sequences()
        end = self.close(scene)
        assert end.result.finish_reason == "closed"
        assert ids(events(turn)) == expected_of([([1, 2], 2, 0)])[1][0]
        assert scene.core.lifecycle.state is SessionState.CLOSED
        with pytest.raises(KeyError):
            _ = scene.context

    def test_behind_a_turn_that_it_refuses_too(self, scene):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        scene.sessions.forget_sequences()
        turn = scene.begin([3], max_tokens=2)
        end = self.close(scene)
        *tokens, interrupted = events(turn)
        assert interrupted.status.finish_reason == "interrupted"
        assert ids(tokens) == expected_of([([1, 2], 2, 0), ([3], 2, 0)])[1][1][: len(ids(tokens))]
        assert end.result.finish_reason == "closed"

    def test_one_that_is_gone_is_not_opened_anew_to_be_closed(self, scene):
        scene.begin([1, 2], max_tokens=2)
        scene.settle()
        scene.sessions.forget_sessions()
        num_done = scene.sessions.num_turns_done
        with pytest.raises(NotFound):
            events(self.close(scene))
        assert scene.core.lifecycle.state is SessionState.CLOSED
        assert scene.sessions.num_turns_done == num_done


# ---- KV that is rebuilt --------------------------------------------------------------------------------------------


def test_what_was_rebuilt_is_told_once_with_the_turn(scene):
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    scene.sessions.rebuild()
    turn, later = scene.begin([3], max_tokens=2), scene.begin([4], max_tokens=2)
    scene.settle()
    *tokens, told, end = events(turn)
    assert [type(event) for event in tokens] == [Tokens, Tokens]
    assert told == Resumed(same_tokens=False, same_numerics=False, reason=told.reason)
    assert "window" in told.reason
    assert end.status.rebuilt
    assert [event for event in events(later) if isinstance(event, Resumed)] == []
    assert not later.result.rebuilt


def test_what_was_rebuilt_and_told_to_a_turn_that_nobody_reads_is_told_to_the_next(scene):
    """After a loss the client asks how the session is, by a turn of its own."""
    scene.begin([1, 2], max_tokens=2)
    scene.settle()
    scene.break_stream()
    scene.sessions.rebuild()
    scene.settle()
    turn = scene.begin([3], max_tokens=2)
    scene.settle()
    assert [event.exact for event in events(turn) if isinstance(event, Resumed)] == [False]


def test_a_turn_that_waits_for_a_cut_is_answered_though_the_session_is_closed_before_the_cut_is_sent(scene):
    """It was held for the cut's answer, which never came: its reader waited for ever."""
    turn = scene.begin([1, 2], max_tokens=4)
    cut = scene.core.begin_interrupt(1e9)
    scene.core.begin_close(1e9)
    scene.flush()
    scene.settle()
    assert isinstance(events(turn)[-1], TurnEnd)
    with pytest.raises(SessionClosed):
        events(cut)
