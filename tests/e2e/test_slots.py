"""Triton's sequence slots, eight of them in a copied model repository: none is lost, and no START waits in silence."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator

import pytest

from microturn.serve.options import default_model_repository
from support.raw import Answer, RawStream, ids
from support.scrape import Page, scrape_until
from support.served import Served, Start

NUM_SLOTS = 8
NUM_SESSIONS = 6  # what the engine opens with so many slots
# A START that gets no slot waits for ever; one that gets a slot is answered within a second on a quiet machine.
ANSWERED_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def served(start_tiny: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    repository = tmp_path_factory.mktemp("slots") / "repository"
    shutil.copytree(default_model_repository(), repository)
    config = repository / "streaming_llm" / "config.pbtxt"
    text = config.read_text()
    assert "max_candidate_sequences: 65536" in text
    config.write_text(text.replace("max_candidate_sequences: 65536", f"max_candidate_sequences: {NUM_SLOTS}"))
    served = start_tiny(f"--model-repository={repository}")
    served.wait_until_ready(60)
    return served


@pytest.fixture
def raw(served: Served) -> Iterator[RawStream]:
    with RawStream(served.address) as stream:
        yield stream


def new_ids() -> Iterator[int | str]:
    """Both kinds of session ids, by turns."""
    while True:
        yield secrets.randbits(62) | 1 << 62
        yield f"session-{secrets.token_hex(8)}"


def start(raw: RawStream, session_id: int | str, **options: object) -> Answer:
    return raw.ask(session_id, start=True, input_ids=ids(1, 2), options=options, timeout_s=ANSWERED_WITHIN_S)


def close(raw: RawStream, session_id: int | str) -> None:
    assert raw.ask(session_id, end=True, input_ids=ids()).error is None


def open_sessions(raw: RawStream, num_sessions: int, **options: object) -> list[int | str]:
    """Opens sessions, each of which must be served."""
    opened = [session_id for session_id, _ in zip(new_ids(), range(num_sessions), strict=False)]
    answers = [start(raw, session_id, max_tokens=0, **options) for session_id in opened]
    assert [answer.error for answer in answers] == [None] * num_sessions
    return opened


def test_refused_starts_hold_no_slot(raw: RawStream) -> None:
    """A START that the engine refuses kept its slot for two hours; with all of them held nobody opened a session."""
    for session_id, _ in zip(new_ids(), range(NUM_SLOTS + 1), strict=False):
        assert start(raw, session_id, temprature=1.0).code == "INVALID_ARGUMENT"
    (session_id,) = open_sessions(raw, 1)
    close(raw, session_id)


def test_a_refused_start_may_be_sent_again_at_once(raw: RawStream) -> None:
    """The END with which the model gives a slot back must not end the sequence that the client opens meanwhile."""
    for session_id, _ in zip(new_ids(), range(50), strict=False):
        assert start(raw, session_id, temprature=1.0).code == "INVALID_ARGUMENT"
        assert start(raw, session_id, max_tokens=0).error is None
        assert raw.ask(session_id, input_ids=ids(3), options={"max_tokens": 1}).error is None
        close(raw, session_id)


def test_silent_sessions_leave_room_to_say_no(served: Served, raw: RawStream) -> None:
    """Sessions took all slots, since Triton's limit was unknown to the engine: the next START was not even refused."""
    opened = open_sessions(raw, NUM_SESSIONS)
    refused = [start(raw, session_id) for session_id, _ in zip(new_ids(), range(NUM_SLOTS + 2), strict=False)]
    assert {answer.code for answer in refused} == {"RESOURCE_EXHAUSTED"}
    # It says so: to who asks for health, in the metrics, and with that to the alert MicroturnNoNewSessions.
    served.wait_for_health("NOT_SERVING", service="new-sessions")
    assert served.health() == "SERVING"
    page = scrape_until(served.metrics_url, lambda page: page.sum("microturn_sessions") == NUM_SESSIONS)
    assert page.sum("microturn_sessions_limit") == NUM_SESSIONS
    assert page.sum("microturn_sequence_slots_limit") == NUM_SLOTS
    assert NUM_SESSIONS <= page.sum("microturn_sequence_slots") < NUM_SLOTS
    for session_id in opened:
        close(raw, session_id)
    served.wait_for_health("SERVING", service="new-sessions")


def test_expired_sessions_give_their_slots_back(served: Served, raw: RawStream) -> None:
    """A session that fell silent and expired held its slot until Triton's own idle time, two hours later."""
    for num_rounds in range(1, 4):
        opened = open_sessions(raw, NUM_SESSIONS, idle_timeout_s=0.5)
        num_ended = num_rounds * NUM_SESSIONS
        scrape_until(served.metrics_url, lambda page, n=num_ended: expired(page) == n)
    # The last ones keep their slot as long as there is room, so that a client that comes back is told why.
    assert raw.ask(opened[-1], input_ids=ids(3)).code == "EXPIRED"


def expired(page: Page) -> float:
    return page.sum("microturn_sessions_ended_total", reason="expired")
