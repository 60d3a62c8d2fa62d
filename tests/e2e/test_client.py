"""What the client library promises, against the real server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from microturn.model.fingerprint import model_fingerprint
from microturn_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    ContextFull,
    InvalidArgument,
    Limits,
    MicroturnError,
    NotFound,
    Session,
    SessionClosed,
    Tokens,
    TurnEnd,
    TurnTimeout,
)
from support.raw import RawStream, ids

PROMPT = list(range(6000, 6020))


def generate(session: Session, given: object, **options: object) -> list[int]:
    return [i for event in session.turn(given, **options) if isinstance(event, Tokens) for i in event.ids]


@pytest.fixture(scope="module")
def expected(server: str) -> list[int]:
    """What the model says after the prompt, in one turn."""
    with Client(server) as client, client.session() as session:
        return generate(session, PROMPT, max_tokens=40, ignore_eos=True)


def test_events_tell_where_they_stand(client: Client) -> None:
    with client.session() as session:
        session.append(PROMPT)
        events = list(session.turn(max_tokens=6, ignore_eos=True, logprobs=True))
        *tokens, end = events
        assert isinstance(end, TurnEnd)
        assert all(isinstance(event, Tokens) for event in tokens)
        position = len(PROMPT)
        for event in tokens:
            assert event.position == position
            assert len(event.logprobs or ()) == len(event.ids)
            position += len(event.ids)
        assert session.context_len == end.status.context_len == position == len(PROMPT) + 6
        assert session.seed == end.status.seed
        assert end.status.usage.output_tokens == 6
        assert end.status.timing_ms.total > 0


def test_the_options_of_the_first_turn_are_its_own(client: Client, expected: list[int]) -> None:
    """On the wire they become the session's: after a first ``append`` the session would stay silent."""
    with client.session() as session:
        session.append(PROMPT[:10], return_appended_ids=True)
        end = session.turn(PROMPT[10:], ignore_eos=True).wait()
        assert end.usage.output_tokens == 16
        assert end.appended_ids is None
    with client.session() as session:
        later = next(token_id for token_id in expected[3:23] if token_id not in expected[:3])
        first = generate(session, PROMPT, max_tokens=3, ignore_eos=True, stop_token_ids=[later])
        assert first == expected[:3]
        assert generate(session, None, max_tokens=20, ignore_eos=True) == expected[3:23]


def test_leaving_a_turn_early_leaves_the_next_one_clean(client: Client, expected: list[int]) -> None:
    with client.session() as session:
        for event in session.turn(PROMPT, max_tokens=20, ignore_eos=True):
            assert isinstance(event, Tokens)
            num_heard = len(event.ids)
            break
        assert generate(session, None, max_tokens=20, ignore_eos=True) == expected[num_heard : num_heard + 20]
        assert session.context_len == len(PROMPT) + num_heard + 20


def test_turns_wait_for_each_other_and_too_many_for_room(client: Client, expected: list[int]) -> None:
    with client.session() as session:
        session.append(PROMPT)
        turns = [session.turn(max_tokens=4, ignore_eos=True) for _ in range(12)]
        told = [token_id for turn in turns for token_id in turn.collect().ids]
        assert told[:40] == expected
        assert session.context_len == len(PROMPT) + 4 * 12


def test_errors_are_typed_and_the_session_goes_on(client: Client, expected: list[int]) -> None:
    with client.session(max_context=128) as session:
        session.append(PROMPT)
        with pytest.raises(InvalidArgument, match="did you mean 'temperature'"):
            session.turn([1], temprature=1).wait()
        with pytest.raises(InvalidArgument, match="UTF-8"):
            session.append(b"caf\xe9 \xff")
        with pytest.raises(InvalidArgument, match="input_ids"):
            session.append([10**9])
        with pytest.raises(ContextFull):
            session.turn(max_tokens=500).wait()
        assert generate(session, None, max_tokens=8, ignore_eos=True) == expected[:8]


def test_a_refused_start_is_tried_again_with_the_next_turn(client: Client, expected: list[int]) -> None:
    with client.session(session_id=f"again-{time.time_ns()}") as session:
        with pytest.raises(InvalidArgument):
            session.append(PROMPT, role="boss")
        assert generate(session, PROMPT, max_tokens=4, ignore_eos=True) == expected[:4]


def test_an_unknown_model_is_not_found(server: str) -> None:
    with Client(server, model="nope") as client, client.session() as session, pytest.raises(NotFound):
        session.append([1])


def test_closing_ends_the_session_on_the_server(client: Client, raw: RawStream) -> None:
    session = client.session(session_id=f"closing-{time.time_ns()}")
    session.append(PROMPT)
    status = session.close()
    assert status is not None
    assert (status.finish_reason, status.context_len) == ("closed", len(PROMPT))
    assert "START" in (raw.ask(session.id, input_ids=ids(5)).error or "")
    with pytest.raises(SessionClosed):
        session.append([1])


def test_a_session_that_is_held_outlives_its_idle_time(client: Client, expected: list[int]) -> None:
    with client.session(idle_timeout_s=0.9) as session:
        session.append(PROMPT)
        time.sleep(2.5)
        assert generate(session, None, max_tokens=4, ignore_eos=True) == expected[:4]


def test_a_turn_that_takes_too_long_ends_here_and_the_session_goes_on(client: Client, expected: list[int]) -> None:
    with client.session() as session:
        session.append(PROMPT)
        with pytest.raises(TurnTimeout):
            session.turn(max_tokens=20, ignore_eos=True, total_timeout_s=0.02).wait()
        told = generate(session, None, max_tokens=20, ignore_eos=True)
        num_handed = session.context_len - len(PROMPT) - 20
        assert num_handed < 20
        assert told == expected[num_handed : num_handed + 20]


def test_nothing_listens_there() -> None:
    with Client("127.0.0.1:1") as client, client.session() as session, pytest.raises(ConnectionLost):
        session.append([1])


async def test_asyncio_sessions_side_by_side(server: str, expected: list[int]) -> None:
    async def talk(client: AsyncClient) -> list[int]:
        async with client.session(idle_timeout_s=0.9) as session:
            await session.append(PROMPT)
            async for event in session.turn(max_tokens=5, ignore_eos=True):
                assert isinstance(event, Tokens)
                heard = list(event.ids)
                break
            await asyncio.sleep(1.5)
            later = session.turn(max_tokens=5, ignore_eos=True)
            heard += [i async for event in later if isinstance(event, Tokens) for i in event.ids]
            return heard[:6]

    async with AsyncClient(server) as client:
        answers = await asyncio.gather(*(talk(client) for _ in range(3)))
    assert answers == [expected[:6]] * 3


async def test_the_model_and_its_limits_are_known_before_a_session_is_opened(server: str, smollm2_dir: str) -> None:
    with Client(server) as client:
        info = client.model_info()
    assert info.protocol_version == 1
    assert info.model_name == Path(smollm2_dir).name
    assert info.model_fingerprint == model_fingerprint(smollm2_dir)
    assert info.limits == Limits(8192, 256, 8, 256, 60.0, 3600.0)
    async with AsyncClient(server) as client:
        assert await client.model_info() == info
    with Client(server, model="another") as client, pytest.raises(MicroturnError, match="another"):
        client.model_info()
    with Client(server) as client, client.session() as session, pytest.raises(ContextFull):
        session.append([5] * (info.limits.max_context + 1))


def test_an_interval_packs_the_tokens_behind_the_first(client: Client, expected: list[int]) -> None:
    """A response for each token costs client and server processor time, so a program may ask for fewer."""
    with client.session() as session:
        turn = session.turn(PROMPT, max_tokens=40, ignore_eos=True, stream_interval_ms=1000)
        arrived = [(event, time.monotonic()) for event in turn if isinstance(event, Tokens)]
        assert [token_id for event, _ in arrived for token_id in event.ids] == expected
        (first, first_s), *_, (_, last_s) = arrived
        assert len(first.ids) == 1
        assert first.position == len(PROMPT)
        assert len(arrived) <= 2 + (last_s - first_s)  # the first, the last, and one for each second between them


def test_where_weights_are_those_of_the_files_a_session_is_told_the_files_fingerprint(client: Client) -> None:
    """Where they are rounded at load it is told another one: the contract suite's server has such weights."""
    with client.session() as session:
        assert session.append([1, 2, 3]).model_fingerprint == client.model_info().model_fingerprint
