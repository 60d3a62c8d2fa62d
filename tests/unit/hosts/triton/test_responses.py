"""Tests of responses: answers are packed and sent, gone clients are found, and no fault of one turn ends others."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from microturn.errors import InvalidArgument, MicroturnError, ResourceExhausted
from microturn.hosts.triton.responses import Answer, Responses, ResponseStream
from microturn.sessions.inputs import TokenInput
from microturn.sessions.turn import SessionId, Status, Turn, TurnOutput, TurnRequest
from support.clock import Clock


@dataclass
class FakeSender:
    """A client that keeps what it is sent; it can be gone, and its calls can fail."""

    sent: list[Answer | None] = field(default_factory=list)
    is_gone: bool = False
    faults: set[str] = field(default_factory=set)

    def send(self, answer: Answer) -> None:
        self._fail("send")
        self.sent.append(answer)

    def end(self) -> None:
        self.sent.append(None)

    def is_cancelled(self) -> bool:
        self._fail("is_cancelled")
        return self.is_gone

    def _fail(self, name: str) -> None:
        if name in self.faults:
            self.faults.remove(name)
            raise RuntimeError(f"{name} of the devil")

    @property
    def text(self) -> str:
        return "".join(answer.text for answer in self.sent if isinstance(answer, TurnOutput))

    @property
    def error(self) -> str:
        (error,) = [str(answer) for answer in self.sent if isinstance(answer, MicroturnError)]
        return error


class Stage:
    """Responses under a virtual clock, with what they tell."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cancelled: list[Turn] = []
        self.answered: list[Turn] = []
        self.faults: list[str] = []
        self.responses = Responses(self.cancelled.append, self._note, self.clock)

    def _note(self, turn: Turn, _end: Status | MicroturnError, _begun_s: float) -> None:
        if self.faults:
            raise RuntimeError(self.faults.pop())
        self.answered.append(turn)

    def turn(self, session_id: SessionId = 1, **options: object) -> tuple[FakeSender, ResponseStream, Turn]:
        """A turn that is watched."""
        sender = FakeSender()
        stream = ResponseStream(sender, self.responses)
        turn = Turn(TurnRequest(session_id, TokenInput(()), stream, self.clock(), options=options))
        self.responses.watch(stream, turn)
        return sender, stream, turn

    def pass_time(self, seconds: float) -> None:
        """Steps ten times a second."""
        for _ in range(round(seconds * 10)):
            self.clock.now_s += 0.1
            self.responses.step()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def ending(reason: str = "length", text: str = "", *, computed: int = 1, replayed: bool = False) -> TurnOutput:
    usage = {"input_tokens": 0, "output_tokens": 0, "computed_tokens": computed, "cached_tokens": 0}
    return TurnOutput(text=text, status=Status(reason, None, 0, 0, 0, usage, {}, 60.0, 1, replayed=replayed))


# ---- sending ---------------------------------------------------------------------------------------------------------


def test_what_is_ready_together_is_one_response(stage: Stage) -> None:
    sender, stream, turn = stage.turn()
    stream.put(TurnOutput(token_ids=(5,), text="a", position=3))
    stream.put(TurnOutput(token_ids=(6,), text="b", position=4))
    stage.responses.step()
    stream.put(TurnOutput(token_ids=(7,), text="c", position=5))
    stream.put(ending(text="d"))
    stage.responses.step()
    assert [(answer.token_ids, answer.text, answer.position) for answer in sender.sent] == [
        ((5, 6), "ab", 3),
        ((7,), "cd", 5),
    ]
    assert stage.answered == [turn]


def test_an_error_drops_what_was_not_sent_yet(stage: Stage) -> None:
    sender, stream, _ = stage.turn()
    stream.put(TurnOutput(token_ids=(5,), text="a"))
    stream.fail(InvalidArgument("no"))
    stage.responses.step()
    assert sender.text == ""
    assert sender.error == "INVALID_ARGUMENT: no"


def test_who_has_gone_is_told_to_the_engine_until_the_turn_is_answered(stage: Stage) -> None:
    sender, stream, turn = stage.turn()
    stage.pass_time(0.3)
    assert stage.cancelled == []
    sender.is_gone = True
    stage.pass_time(0.1)
    assert turn in stage.cancelled
    stream.put(ending("cancelled"))
    stage.responses.step()
    stage.cancelled.clear()
    stage.pass_time(1)
    assert stage.cancelled == []


def test_the_last_step_sends_what_was_posted_before(stage: Stage) -> None:
    sender, stream, _ = stage.turn()
    stream.put(ending(text="bye"))
    stage.responses.close()
    assert not stage.responses.step(block=True)
    assert sender.text == "bye"


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_sender_that_cannot_tell_of_its_client_ends_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """One exception in `is_cancelled` ended the thread that sends all responses: every client hung, in silence."""
    broken, broken_stream, _ = stage.turn(1)
    other, other_stream, other_turn = stage.turn(2)
    broken.faults.add("is_cancelled")
    with caplog.at_level(logging.ERROR):
        stage.pass_time(0.5)
    assert caplog.text.count("is_cancelled of the devil\n") == 1
    other.is_gone = True
    stage.pass_time(0.5)
    assert set(stage.cancelled) == {other_turn}
    for stream in (broken_stream, other_stream):
        stream.put(ending(text="still here"))
    stage.responses.step()
    assert broken.text == other.text == "still here"


def test_a_report_that_fails_ends_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """One exception in `answered` ended the thread that sends all responses: every client hung, in silence."""
    stage.faults.append("a span of the devil")
    clients = [stage.turn(n) for n in (1, 2, 3)]
    for _, stream, _ in clients:
        stream.put(ending(text="hello"))
    with caplog.at_level(logging.ERROR):
        stage.responses.step()
    assert [sender.text for sender, _, _ in clients] == ["hello"] * 3
    assert stage.answered == [turn for _, _, turn in clients[1:]]
    assert "a span of the devil" in caplog.text


def test_an_answer_of_which_a_piece_is_lost_ends_at_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A response that could not be sent was skipped: the client took what came behind it for the whole answer, or, when
    it was the last one, waited for ever."""
    broken, broken_stream, broken_turn = stage.turn(1)
    other, other_stream, _ = stage.turn(2)
    broken.faults.add("send")
    for stream in (broken_stream, other_stream):
        stream.put(TurnOutput(token_ids=(5,), text="first"))
    with caplog.at_level(logging.ERROR):
        stage.responses.step()
    for stream in (broken_stream, other_stream):
        stream.put(ending(text=" second"))
    stage.responses.step()
    assert broken.text == ""
    assert broken.error.startswith("UNAVAILABLE: the answer could not be sent")
    assert stage.cancelled == [broken_turn]
    assert other.text == "first second"


# ---- a client that asks for too much ---------------------------------------------------------------------------------


def keep_alive(stage: Stage, session_id: SessionId = 1, **options: object) -> FakeSender:
    """An empty turn, which the engine answers at once."""
    sender, stream, _ = stage.turn(session_id, **options)
    stream.put(ending("append", computed=0))
    stage.responses.step()
    return sender


def test_a_flood_of_keepalives_is_answered_at_a_bounded_rate(stage: Stage) -> None:
    """Triton keeps 7 KB for each response that a client does not read, for ever: 30,000 keep-alives were 200 MB."""
    senders: list[FakeSender] = []
    for _ in range(200):
        senders += [keep_alive(stage) for _ in range(30)]
        stage.pass_time(0.1)
    stage.pass_time(10)
    num_answered = sum(sender.sent != [None] for sender in senders)
    assert num_answered <= 100 + 10 * 21 + 16
    assert num_answered + stage.responses.num_withheld == len(senders) == len(stage.answered)
    assert all(len(sender.sent) == 1 for sender in senders)


def test_who_waits_for_each_answer_gets_each(stage: Stage) -> None:
    for _ in range(300):
        sender = keep_alive(stage)
        for _ in range(2):
            if not sender.sent:
                stage.pass_time(0.1)
        assert sender.sent, "a client that sends one turn at a time waits 0.1 s at most"
    assert stage.responses.num_withheld == 0


def test_the_last_that_wait_are_answered_in_their_order(stage: Stage) -> None:
    senders = [keep_alive(stage) for _ in range(200)]
    stage.pass_time(2)
    assert [sender.sent for sender in senders[100:184]] == [[None]] * 84
    assert all(isinstance(sender.sent[0], TurnOutput) for sender in [*senders[:100], *senders[184:]])


def test_an_answer_that_was_computed_never_waits_and_overtakes_nothing(stage: Stage) -> None:
    held = [keep_alive(stage) for _ in range(101)][-1]
    assert held.sent == []
    speaking, stream, _ = stage.turn()
    stream.put(TurnOutput(token_ids=(5,), text="at"))
    stage.responses.step()
    assert len(held.sent) == 1
    assert speaking.text == "at"
    stream.put(ending(text=" once"))
    stage.responses.step()
    assert speaking.text == "at once"


@pytest.mark.parametrize("kind", ["refusals", "repetitions"])
def test_refusals_and_repetitions_are_paced_too(stage: Stage, kind: str) -> None:
    senders = []
    for _ in range(200):
        sender, stream, _ = stage.turn()
        if kind == "refusals":
            stream.fail(ResourceExhausted("too many turns wait", retry_after_ms=200))
        else:
            stream.put(ending(text="as before", replayed=True))
        stage.responses.step()
        senders.append(sender)
    assert sum(bool(sender.sent) and sender.sent != [None] for sender in senders) == 100
    assert stage.responses.num_withheld == 84


def test_other_sessions_and_who_has_another_key_are_not_held_up(stage: Stage) -> None:
    """A stranger who floods a session with turns that are refused must not keep its owner from being answered."""
    for _ in range(200):
        keep_alive(stage, 1, session_key="guess")
    assert keep_alive(stage, 1, session_key="right").sent
    assert keep_alive(stage, 2).sent


def test_what_waits_is_sent_when_the_server_stops(stage: Stage) -> None:
    held = [keep_alive(stage) for _ in range(105)][-5:]
    stage.responses.close()
    stage.responses.step()
    assert all(len(sender.sent) == 1 and sender.sent != [None] for sender in held)


def test_a_warning_names_who_floods_once_in_a_while(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            keep_alive(stage, "chatty")
    assert len(caplog.records) == 1
    assert "session 'chatty' gets more keep-alives" in caplog.text
