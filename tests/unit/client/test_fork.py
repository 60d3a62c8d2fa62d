"""A branch begins with what its parent's client knows, whatever the server has of the parent just then."""

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from microturn_client import FailedPrecondition, Recovery
from microturn_client._lifecycle import SessionState
from microturn_client._requests import Requests
from microturn_client._session_core import SessionCore
from microturn_client.testing import FakeServer
from support.blocking import blocking
from support.survival_scene import PATIENT, BranchScene, Scene, events, expected_of, ids

SAID = [("the fo", 0, 1), ("x ju", 4, 1), ([7, 8], 0, 1), ("mps", 0, 1)]
LAST = (" over", 5, 1)


@pytest.fixture
def scene():
    return Scene()


def told(scene, said=SAID):
    """What the session holds once all was said."""
    for given_, num_tokens, temperature in said:
        scene.begin(given_, max_tokens=num_tokens, temperature=float(temperature))
        scene.settle()
    return scene.context


def check_goes_on(branch, said=SAID):
    """The branch, half words included, is what the session was when all had been said."""
    turn = branch.begin(LAST[0], max_tokens=LAST[1], temperature=float(LAST[2]))
    branch.settle()
    assert ids(events(turn)) == expected_of([*said, LAST])[1][-1]


def steps_of(*scenes):
    return [step for scene in scenes for step in (scene.deliver_up, scene.deliver_down, scene.wait, scene.flush)]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_session_is_forked_while_it_is_told_again_or_is_about_to_be(chance):
    """What the server had been told of it by then became the branch, or nothing at all, and nobody heard of it."""
    scene = Scene()
    before = told(scene)
    scene.kill()
    for _ in range(chance.randrange(30)):
        chance.choice([*steps_of(scene), scene.sessions.step])()
    branch = BranchScene(scene)
    for _ in range(chance.randrange(60)):
        chance.choice([*steps_of(scene, branch), scene.sessions.step])()
    branch.settle()
    assert events(branch.opening)[-1].status.context_len == len(before)
    assert branch.core.transcript.is_replayable
    check_goes_on(branch)
    scene.settle()
    check_goes_on(scene)


def test_a_turn_that_has_ended_meanwhile_is_not_in_it(scene):
    """It was in the branch, whose client did not know it, and could not tell the branch again."""
    before = told(scene)
    scene.begin([1, 2, 3], max_tokens=3)
    branch = BranchScene(scene)
    scene.deliver_up()
    while scene.sessions.is_busy:
        scene.sessions.step()
    branch.settle()
    assert events(branch.opening)[-1].status.context_len == len(before)
    branch.kill()
    branch.settle()
    check_goes_on(branch)


@pytest.mark.parametrize("has_ended", [False, True])
def test_of_a_turn_that_cuts_it_has_all_or_nothing(scene, has_ended):
    """Cut back to its former length, the context behind such a turn would be a part of its answer."""
    before = told(scene)
    scene.begin([1], max_tokens=2 * len(before), rewind_to=2)
    scene.deliver_up()
    while has_ended and scene.sessions.is_busy:
        scene.sessions.step()
    branch = BranchScene(scene)
    branch.flush()
    branch.deliver_up()
    assert scene.sessions.context_of(2) == (scene.context if has_ended else before)


def test_a_cut_behind_what_is_known_does_not_matter(scene):
    before = told(scene)
    turn = scene.begin([1], max_tokens=9)
    while not turn.num_handed:
        scene.deliver_up()
        scene.sessions.step()
        scene.deliver_down()
        events(turn)
    scene.core.begin_interrupt(1e9, heard_tokens=1)
    branch = BranchScene(scene)
    scene.settle()
    branch.settle()
    assert events(branch.opening)[-1].status.context_len == len(before)
    check_goes_on(branch)


@pytest.mark.parametrize("has_died", [False, True])
def test_a_branch_that_is_told_all_has_the_seed_that_the_server_drew(has_died):
    scene = Scene()
    scene.core = SessionCore(Requests("m", 1, {}, is_recorded=True), lambda: scene.now_s, recovery=PATIENT)
    told(scene)
    seed = scene.core.seed
    if has_died:
        scene.kill()
    else:
        scene.sessions._sessions[1].cut(3)
    branch = BranchScene(scene)
    branch.settle()
    assert events(branch.opening)[-1].status.seed == seed


def test_a_branch_that_is_told_all_ends_with_its_session(scene):
    told(scene)
    scene.kill()
    while scene.core.lifecycle.state is not SessionState.REPLAYING:
        scene.wait()
        scene.deliver_up()
        scene.deliver_down()
    branch = BranchScene(scene)
    branch.settle()
    [resumed, _] = events(branch.opening)
    assert resumed.same_tokens
    assert not resumed.same_numerics
    assert "being told" in resumed.reason
    branch.core.begin_close(1e9)
    branch.settle()
    assert list(scene.sessions._sessions) == [1]


def test_what_is_not_known_whole_is_forked_as_it_is_or_not_at_all():
    scene = Scene(Recovery(max_transcript_bytes=40))
    before = told(scene, [([1] * 20, 3, 0)])
    assert not scene.core.transcript.is_complete
    branch = BranchScene(scene)
    branch.settle()
    assert scene.sessions.context_of(2) == before
    scene.sessions._sessions[1].cut(5)
    branch = BranchScene(scene, 3)
    branch.settle()
    with pytest.raises(FailedPrecondition):
        events(branch.opening)


def test_a_session_that_was_taken_up_is_forked_before_its_length_is_known(scene):
    before = told(scene)
    attached = Scene(sessions=scene.sessions)
    requests = Requests("m", 1, {"session_key": "k"}, is_recorded=True)
    attached.core = SessionCore(requests, lambda: 0.0, recovery=PATIENT, is_attached=True)
    branch = BranchScene(attached)
    branch.settle()
    assert branch.core.context_len == len(before)
    check_goes_on(branch)


def test_without_a_recovery_the_server_alone_knows():
    scene = Scene(None)
    told(scene, [([1, 2], 3, 0)])
    scene.sessions._sessions[1].cut(4)
    branch = BranchScene(scene)
    branch.settle()
    assert events(branch.opening)[-1].status.context_len == 4


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_program_forks_while_its_session_is_told_again(kind):
    server = FakeServer(token_s=0.02)
    with server.client() if kind == "threads" else blocking(server.async_client) as client:
        session, other = client.session(), client.session()
        session.turn("The secret word is tulip. Remember it. ", max_tokens=10).wait()
        server.restart()
        while session._core.lifecycle.state is not SessionState.REPLAYING:
            time.sleep(0.001)
        branch = session.fork()
        assert branch.context_len == session.context_len == 49
        other.append(server.context_of(branch.id))
        assert ids(branch.turn(" and", max_tokens=5)) == ids(other.turn(" and", max_tokens=5))
