"""Somebody who knows a session's id and not its key: what Triton does to the sequence, and how the owner goes on.

The model refuses such a turn and changes nothing. Triton never hears of that: it has ended the sequence of an END when
the model sees it. The owner's next turn is told so in Triton's words, and START with `resume` goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from microturn.settings import TENANT_HEADER
from support.raw import Answer, RawStream, ids
from support.share import model_server
from support.tiny_model_dir import write_tiny_model

KEY = {"session_key": "the owner's"}
GENERATE = {"max_tokens": 4, "ignore_eos": True}
OWNER = (TENANT_HEADER, "owner")

OpenStream = Callable[..., RawStream]


@pytest.fixture(scope="module")
def tenants_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    with model_server(str(model), "max_sessions_per_tenant=50") as server:
        yield server.address


@pytest.fixture
def stream(tenants_server: str) -> Iterator[OpenStream]:
    """Opens a stream with these headers."""
    with ExitStack() as streams:
        yield lambda *headers: streams.enter_context(RawStream(tenants_server, headers))


def turns(numbered: bool) -> list[dict[str, Any]]:
    """What the owner says of three turns: START, and two that generate."""
    options = [{"max_tokens": 0} | KEY, GENERATE | KEY, GENERATE | KEY]
    return [said | ({"turn": number} if numbered else {}) for number, said in enumerate(options)]


def undisturbed(stream: RawStream, session_id: str, numbered: bool) -> list[list[int]]:
    """What the turns answer where nobody comes between."""
    first, second, third = turns(numbered)
    stream.ask(session_id, start=True, input_ids=ids(5, 6, 7), options=first)
    return [
        stream.ask(session_id, input_ids=ids(8), options=second).token_ids,
        stream.ask(session_id, input_ids=ids(9), options=third).token_ids,
    ]


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("theirs", [{}, {"session_key": "guessed"}])
@pytest.mark.parametrize("headers", [[], [OWNER]])
def test_a_strangers_end_ends_the_sequence_and_resume_goes_on_with_everything(
    stream: OpenStream, headers: list[tuple[str, str]], theirs: dict[str, str], numbered: bool
) -> None:
    owner, stranger = stream(*headers), stream(*headers)
    name = f"{len(headers)}{len(theirs)}{numbered}"
    expected = undisturbed(stream(*headers), f"undisturbed {name}", numbered)
    first, second, third = turns(numbered)
    owner.ask(name, start=True, input_ids=ids(5, 6, 7), options=first)
    assert stranger.ask(name, end=True, input_ids=ids(), options=theirs).code == "PERMISSION_DENIED"

    refused = owner.ask(name, input_ids=ids(8), options=second)
    assert "must specify the START flag" in (refused.error or "")
    assert (
        stranger.ask(name, start=True, input_ids=ids(1), options={"resume": True} | theirs).code == "PERMISSION_DENIED"
    )
    assert stranger.ask(name, end=True, input_ids=ids(), options=theirs).code == "PERMISSION_DENIED"
    resumed = owner.ask(name, start=True, input_ids=ids(8), options=second | {"resume": True})
    assert (resumed.error, resumed.token_ids, resumed.position) == (None, expected[0], 4)
    if numbered:
        again = owner.ask(name, input_ids=ids(8), options=second)
        assert again.status is not None
        assert (again.status["replayed"], again.token_ids) == (True, expected[0])
    assert owner.ask(name, input_ids=ids(9), options=third).token_ids == expected[1]
    assert reason_of(owner.ask(name, end=True, input_ids=ids(), options=KEY)) == "closed"


def test_another_tenants_end_is_a_strangers_even_with_the_key(stream: OpenStream) -> None:
    owner, other = stream(OWNER), stream((TENANT_HEADER, "other"))
    owner.ask("ours", start=True, input_ids=ids(5, 6), options={"max_tokens": 0} | KEY)
    assert other.ask("ours", end=True, input_ids=ids(), options=KEY).code == "PERMISSION_DENIED"
    assert "must specify the START flag" in (owner.ask("ours", input_ids=ids(7), options=KEY).error or "")
    answer = owner.ask("ours", start=True, input_ids=ids(7), options={"resume": True, "max_tokens": 0} | KEY)
    assert answer.status is not None
    assert answer.status["context_len"] == 3


@pytest.mark.parametrize("resume", [{}, {"resume": True}])
def test_a_strangers_start_ends_nothing(stream: OpenStream, resume: dict[str, bool]) -> None:
    owner, stranger = stream(), stream()
    name = f"begun {len(resume)}"
    owner.ask(name, start=True, input_ids=ids(5, 6), options={"max_tokens": 0} | KEY)
    assert stranger.ask(name, start=True, input_ids=ids(1), options=resume).code == "PERMISSION_DENIED"
    answer = owner.ask(name, input_ids=ids(7), options={"max_tokens": 0} | KEY)
    assert answer.status is not None
    assert answer.status["context_len"] == 3


@pytest.mark.parametrize("flags", [{}, {"start": True}])
def test_the_owners_end_after_a_strangers_closes_with_resume(stream: OpenStream, flags: dict[str, bool]) -> None:
    owner, stranger = stream(), stream()
    name = f"closed {len(flags)}"
    owner.ask(name, start=True, input_ids=ids(5, 6), options={"max_tokens": 0} | KEY)
    assert stranger.ask(name, end=True, input_ids=ids(), **flags).code == "PERMISSION_DENIED"
    assert "must specify the START flag" in (owner.ask(name, end=True, input_ids=ids(), options=KEY).error or "")
    closed = owner.ask(name, start=True, end=True, input_ids=ids(), options={"resume": True} | KEY)
    assert (reason_of(closed), closed.status and closed.status["context_len"]) == ("closed", 2)
    gone = owner.ask(name, start=True, end=True, input_ids=ids(), options={"resume": True} | KEY)
    assert gone.code == "NOT_FOUND"


def reason_of(answer: Answer) -> str | None:
    return None if answer.status is None else answer.status["finish_reason"]
