"""What the client logs: nothing in peace, failures at levels that fit them, never a secret or a word of the talk."""

import logging
import time

import pytest

from microturn_client import ConnectionLost, NotFound, Recovery
from microturn_client.testing import FakeServer

WORDS = "nobody's business"
KEY = "the-key-of-the-session"


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.DEBUG, logger="microturn_client")
    return lambda level=logging.INFO: [
        (record.levelname, record.getMessage()) for record in caplog.records if record.levelno >= level
    ]


@pytest.fixture
def server():
    return FakeServer()


def test_without_a_failure_nothing_is_logged(server, records):
    with server.client() as client, client.session() as session:
        session.turn(WORDS, max_tokens=3).wait()
    assert records() == []


def test_a_stream_that_breaks_is_information(server, records):
    with server.client() as client, client.session(session_id="mine") as session:
        session.append(WORDS)
        server.break_streams()
        session.append(WORDS)
        assert [level for level, _ in records()] == ["INFO", "INFO"]
        (_, lost), (_, resumed) = records()
        assert lost.startswith("session 'mine': no stream (UNAVAILABLE: the stream ended: the stream was reset")
        assert resumed.startswith("session 'mine' goes on: the session lives")


async def test_a_server_that_lost_the_session_is_a_warning_where_it_is_not_the_same(server, records):
    async with server.async_client() as client, client.session() as session:
        await session.append(WORDS)
        server.restart()
        await session.append(WORDS)
        assert any("opened anew" in message for _, message in records())
        server.rebuild()
        await session.append(WORDS)
        assert records(logging.WARNING)[-1][0] == "WARNING"
        assert "goes on otherwise" in records(logging.WARNING)[-1][1]


def test_a_session_that_is_lost_is_a_warning(server, records):
    recovery = Recovery(give_up_after_s=0.05, give_up_opening_s=0.05, max_transcript_bytes=1)
    with server.client(recovery=recovery) as client:
        session = client.session()
        session.append(WORDS)
        session.append(WORDS)
        server.restart()
        with pytest.raises(NotFound):
            session.append(WORDS)
        assert [level for level, _ in records(logging.WARNING)] == ["WARNING"]
        assert "is lost (NOT_FOUND)" in records(logging.WARNING)[0][1]
        server.go_down()
        with pytest.raises(ConnectionLost):
            client.session().append(WORDS)
        assert "is lost (UNAVAILABLE" in records(logging.WARNING)[1][1]


def test_attempts_in_vain_are_for_debugging(server, records):
    recovery = Recovery(give_up_after_s=20.0, first_delay_s=0.01, max_delay_s=0.02)
    with server.client(recovery=recovery) as client, client.session() as session:
        session.append(WORDS)
        server.go_down()
        turn = session.turn(WORDS, max_tokens=1)
        deadline = time.monotonic() + 10.0
        while len(records(logging.DEBUG)) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [level for level, _ in records()] == ["INFO"]
        server.come_back()
        turn.wait()


def test_neither_words_nor_secrets_are_logged(server, records):
    with server.client(token="a-token") as client, client.session(session_key=KEY, seed=987654321) as session:
        session.append(WORDS)
        server.restart()
        session.turn(WORDS, max_tokens=3, stop=["stop it"]).wait()
        server.break_streams()
        session.append(WORDS)
        said = " ".join(message for _, message in records(logging.DEBUG))
    assert said
    for secret in (WORDS, KEY, "a-token", session.token, "987654321", "stop it"):
        assert secret not in said
