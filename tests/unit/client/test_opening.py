import pytest

from microturn_client import InvalidArgument, PermissionDenied, Recovery, SessionClosed
from microturn_client._opening import attached_core, new_core, token_of
from microturn_client.testing import FakeServer


def test_an_id_that_nobody_chose_comes_with_a_key_and_a_seed():
    one, other = (new_core("m", None, {}, Recovery()) for _ in range(2))
    assert one.id != other.id
    keys = {core.requests.key for core in (one, other)}
    seeds = {core.requests.options["seed"] for core in (one, other)}
    assert len(keys) == len(seeds) == 2
    assert None not in keys


@pytest.mark.parametrize("recovery", [None, Recovery()])
def test_what_a_user_chose_stays(recovery):
    core = new_core("m", "mine", {"seed": 3, "temperature": 0.5, "session_key": "k"}, recovery)
    assert core.id == "mine"
    assert core.requests.options == {"seed": 3, "temperature": 0.5, "session_key": "k"}
    assert (core.survival is not None) == (recovery is not None)


def test_an_id_that_somebody_chose_has_no_key_of_ours():
    assert new_core("m", "mine", {}, Recovery()).requests.key is None


def test_a_session_that_goes_on_from_another_takes_that_ones_key_and_seed():
    core = new_core("m", None, {"fork_of": "5", "session_key": "k"}, Recovery())
    assert core.requests.key == "k"
    assert "seed" not in core.requests.options


@pytest.mark.parametrize("session_id", [7, "ä b"])
def test_a_token_is_a_session(session_id):
    core = new_core("m", session_id, {"session_key": "k"}, Recovery())
    core.requests.route = "there"
    again = attached_core(token_of(core.requests), {}, Recovery())
    assert (again.id, again.requests.model, again.requests.key) == (session_id, "m", "k")
    assert again.requests.route == "there"
    assert token_of(again.requests) == token_of(core.requests)


@pytest.mark.parametrize("text", ["", "x", "e30", "bnVsbA", "🙂"])
def test_another_text_is_no_token(text):
    with pytest.raises(InvalidArgument, match="no token"):
        attached_core(text, {}, Recovery())


def test_an_attached_session_is_gone_on_with_by_many_and_lost_with_its_server():
    server = FakeServer()
    with server.client() as client, client.session() as session:
        session.turn("hello", max_tokens=3).wait()
        with server.client() as elsewhere:
            attached = elsewhere.attach(session.token)
            assert attached.append([1]).context_len == 9
            server.break_streams()
            assert attached.append([1]).context_len == 10
        with pytest.raises(SessionClosed):
            attached.append([1])


async def test_with_asyncio_too():
    server = FakeServer()
    async with server.async_client() as client, client.session(session_key="k") as session:
        await session.append("hello ")
        thief = client.session(session_id=session.id, session_key="l", resume=True)
        with pytest.raises(PermissionDenied):
            await thief.append([1])
        branch = await session.fork()
        await branch.append([1, 2])
        assert (await branch.rewind(to=3)).context_len == 3
        assert (await session.append([1])).context_len == 7
        assert (await client.attach(branch.token).append([5])).context_len == 4
