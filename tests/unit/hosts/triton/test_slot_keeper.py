"""Giving slots back, beside a Triton that takes a model's own requests and brings them to the model."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from microturn.errors import InvalidArgument, MicroturnError
from microturn.hosts.triton.sequence_slots import Control
from microturn.hosts.triton.slot_keeper import SlotKeeper, num_slots_of
from microturn.sessions.turn import TurnOutput

FINAL = 1
TIMEOUT_S = 10


class Request:
    """A request as a model sees it, and as it makes one of its own."""

    def __init__(self, correlation_id: int | str, flags: int, request_id: str = "", **given: Any) -> None:
        self.given = given
        self.flags = lambda: flags
        self.request_id = lambda: request_id
        self.correlation_id = lambda: correlation_id
        self.sent: list[int] = []
        self.get_response_sender = lambda: SimpleNamespace(send=lambda flags: self.sent.append(flags))


class Triton:
    """`triton_python_backend_utils`, whose requests to itself a test takes from `requests`, and answers or refuses."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def Tensor(self, name: str, array: Any) -> tuple[str, tuple[int, ...]]:  # noqa: N802
        return name, array.shape

    def InferenceRequest(self, **given: Any) -> Any:  # noqa: N802
        request = Request(**given)

        def exec(decoupled: bool) -> Iterator[Any]:
            assert decoupled
            self.requests.put(request)
            error = self.answers.get(timeout=TIMEOUT_S)
            message = SimpleNamespace(message=lambda: error)
            yield SimpleNamespace(has_error=lambda: error is not None, error=lambda: message)

        request.exec = exec  # type: ignore[attr-defined]
        return request


class Sink:
    def __init__(self) -> None:
        self.told: queue.SimpleQueue[TurnOutput | MicroturnError] = queue.SimpleQueue()
        self.put: Callable[[TurnOutput], None] = self.told.put
        self.fail: Callable[[MicroturnError], None] = self.told.put


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def keeper(triton: Triton) -> Iterator[SlotKeeper]:
    with closing(SimpleNamespace(close=lambda: keeper.stop())):
        keeper = SlotKeeper(triton, 8, "streaming_llm", 1)
        yield keeper


def refuse(keeper: SlotKeeper, session_id: int | str) -> tuple[Sink, InvalidArgument]:
    """A client's START comes, and the engine refuses it."""
    start, sink, refusal = Request(session_id, Control.START), Sink(), InvalidArgument("no")
    assert not keeper.take(start)
    keeper.sink_of(start, sink).fail(refusal)
    return sink, refusal


@pytest.mark.parametrize("session_id", [2**63 - 1, "a name"])
def test_a_refused_start_is_told_when_our_end_has_come(triton: Triton, keeper: SlotKeeper, session_id: Any) -> None:
    sink, refusal = refuse(keeper, session_id)
    end = triton.requests.get(timeout=TIMEOUT_S)
    assert (end.correlation_id(), end.flags()) == (session_id, Control.END)
    assert end.given["inputs"] == [("input_ids", (1, 0))]
    assert (end.given["model_name"], end.given["model_version"]) == ("streaming_llm", 1)
    assert keeper.take(end)
    assert end.sent == [FINAL]
    assert sink.told.get(timeout=TIMEOUT_S) is refusal
    triton.answers.put(None)


def test_a_refusal_goes_out_where_triton_knows_the_sequence_no_more(triton: Triton, keeper: SlotKeeper) -> None:
    sink, refusal = refuse(keeper, 1)
    triton.answers.put("must specify the START flag")
    assert sink.told.get(timeout=TIMEOUT_S) is refusal
    assert keeper.slots.count() == {"session": 0, "ended": 0, "ending": 0}


def test_a_refusal_goes_out_though_nothing_comes_of_our_end(triton: Triton, keeper: SlotKeeper) -> None:
    sink, refusal = refuse(keeper, 1)
    assert sink.told.get(timeout=TIMEOUT_S) is refusal
    triton.answers.put(None)


def test_what_waits_when_the_keeper_stops_is_told(triton: Triton) -> None:
    keeper = SlotKeeper(triton, 8, "streaming_llm", 1)
    sink, refusal = refuse(keeper, 1)
    triton.requests.get(timeout=TIMEOUT_S)
    keeper.stop()
    assert sink.told.get_nowait() is refusal
    triton.answers.put(None)


def test_an_accepted_start_is_answered_at_once(keeper: SlotKeeper) -> None:
    start, sink = Request(1, Control.START), Sink()
    assert not keeper.take(start)
    through = keeper.sink_of(start, sink)
    keeper.slots.session_opened(SimpleNamespace(id=1))
    pieces = [TurnOutput(text="a"), TurnOutput(text="b")]
    for piece in pieces:
        through.put(piece)
    through.fail(failure := InvalidArgument("later"))
    assert [sink.told.get_nowait() for _ in range(3)] == [*pieces, failure]
    assert keeper.slots.count()["session"] == 1


@pytest.mark.parametrize("flags", [0, Control.END, Control.START | Control.END])
def test_a_turn_that_opens_nothing_goes_its_own_way(keeper: SlotKeeper, flags: int) -> None:
    sink = Sink()
    assert not keeper.take(Request(1, flags))
    assert keeper.sink_of(Request(1, flags), sink) is sink
    assert keeper.slots.count() == {"session": 0, "ended": 0, "ending": 0}


def test_a_client_cannot_pass_for_the_model(keeper: SlotKeeper) -> None:
    assert not keeper.take(Request(1, Control.START))
    assert not keeper.take(Request(1, Control.END, request_id="microturn-END-"))


def test_the_slots_are_those_of_the_configuration() -> None:
    assert num_slots_of({"sequence_batching": {"oldest": {"max_candidate_sequences": 8}}}) == 8
    with pytest.raises(InvalidArgument, match=r"has no sequence_batching \{ oldest"):
        num_slots_of({"sequence_batching": {"direct": {}}})
