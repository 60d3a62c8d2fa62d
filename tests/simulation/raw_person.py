"""Somebody who writes to the wire by herself: all that the contract allows, and much that it does not.

What she knows of her session is what she was told. What must come of what she says, the oracle of the server says; she
herself only checks that each of her requests is answered, once, in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from microturn_client._errors import FailedPrecondition, MicroturnError, NotFound
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from microturn_client._wire import build_request, mark_end, mark_start, read_response
from simulation.network import Stream
from simulation.plan import Act, Person
from simulation.settings import SINK_TOKENS, WINDOW_TOKENS
from simulation.waiting import Wait, Waiting
from simulation.world import Broken, World
from support.fake_runner import HIDDEN_SIZE, VOCAB_SIZE

# A stream that says nothing for so long while an answer is due is left.
_PATIENCE_S = 6.0
# What is tried again is tried so much later.
_RETRY_S = 0.2

Connect = Callable[[int | str, Callable[[ModelStreamInferResponse], None], Callable[[], None]], Stream | None]


@dataclass(eq=False)
class _Sent:
    """A request without an answer."""

    request: ModelInferRequest
    wait: Wait
    number: int | None
    ids: list[int]


class RawPerson:
    """One raw client.

    Args:
        world: the clock.
        person: what she does.
        connect: opens a stream for a session.
        waiting: keeps how long she waits.
    """

    def __init__(self, world: World, person: Person, connect: Connect, waiting: Waiting) -> None:
        self.person = person
        self.is_done = False
        self._world = world
        self._connect = connect
        self._waiting = waiting
        self._random = world.random("person", person.number)
        self._session_id = person.session_id
        self._context_len = 0
        self._next_number = 0
        self._stream: Stream | None = None
        self._sent: dict[str, _Sent] = {}
        self._is_flooding = False
        self._num_streams = 0
        self._numbered: list[ModelInferRequest] = []
        self._request_ids = itertools.count(1)
        self._acts = iter(person.acts)
        self._name = f"person {person.number}"
        self._next_act()

    def finish(self) -> None:
        """She goes, and leaves what she has open."""
        self._leave_stream()

    # ---- her program ---------------------------------------------------------------------------------------------

    def _next_act(self) -> None:
        act = next(self._acts, None)
        if act is None:
            self.is_done = True
            self._read(goes_on=True)
            return
        self._world.after(act.pause_s, partial(self._do, act))

    def _do(self, act: Act) -> None:
        getattr(self, f"_{act.kind}")(act)
        self._next_act()

    def _start(self, act: Act) -> None:
        self._context_len = self._next_number = 0
        self._say(replace(act, kept_eighths=None), start=True)

    def _say(self, act: Act, **options: Any) -> None:
        """A turn of the session, or with START."""
        start = options.pop("start", False)
        self._send(self._request(act, start=start, **options), act)

    def _say_much(self, act: Act) -> None:
        for number in range(2 + act.choice % 4):
            self._say(replace(act, kept_eighths=None, max_tokens=act.max_tokens if number % 2 else 0))

    def _talk_over(self, act: Act) -> None:
        self._say(act, on_overlap="interrupt")

    def _repeat(self, act: Act) -> None:
        """A numbered turn comes again, perhaps while the first still runs."""
        if self._numbered:
            self._send_again(self._numbered[-1 - act.choice % len(self._numbered)], resumes=act.choice % 5 == 0)

    def _say_otherwise(self, act: Act) -> None:
        """Something else under the number of an earlier turn."""
        if self._numbered:
            number = self._numbered[-1].parameters["turn"].int64_param
            self._say(replace(act, is_numbered=False), turn=number)

    def _say_any_number(self, act: Act) -> None:
        self._say(replace(act, is_numbered=False), turn=max(0, self._next_number + act.choice % 5 - 2))

    def _say_nonsense(self, act: Act) -> None:
        """What is refused for what it says; with START it opens nothing."""
        start = act.choice % 3 == 0
        if act.choice % 2:
            self._say(replace(act, ids=(VOCAB_SIZE,), text=None, num_embeds=0), start=start)
        else:
            self._say(act, start=start, **{("max_token", "nonsense")[act.choice // 2 % 2]: 5})

    def _say_too_much(self, act: Act) -> None:
        self._say(replace(act, ids=(7,) * 300, text=None, num_embeds=0))

    def _come_with_any_key(self, act: Act) -> None:
        key = ("hers", "his", "another")[act.choice % 3]
        self._say(replace(act, is_numbered=False, end=act.choice % 4 == 0), session_key=key)

    def _fork(self, act: Act) -> None:
        """From now on she talks to a branch of her session."""
        parent, self._session_id = self._session_id, self.person.number * 1000 + 1000 + act.number
        self._next_number = 0
        self._say(replace(act, is_windowed=False), start=True, fork_of=str(parent))

    def _resume(self, act: Act) -> None:
        self._say(replace(act, is_windowed=False), start=True, resume=True)

    def _keep_alive(self, act: Act) -> None:
        self._say(Act(act.number, act.kind))

    def _leave(self, act: Act) -> None:
        """Her stream ends in the middle of what is on it; the next turn comes on another."""
        self._leave_stream()

    def _stop_reading(self, act: Act) -> None:
        self._read(goes_on=False)

    def _read(self, act: Act | None = None, *, goes_on: bool = True) -> None:
        if self._stream is not None:
            self._stream.read(goes_on=goes_on)

    def _flood(self, act: Act) -> None:
        """She asks for what costs nothing, again and again, and reads nothing of it for a while."""
        self._say(Act(act.number, act.kind))
        self._is_flooding = True
        self._read(goes_on=False)
        for _ in range(150 + act.choice % 150):
            request = self._request(Act(act.number, act.kind), start=False)
            del request.parameters["triton_enable_empty_final_response"]
            self._write(request, None, is_waited_for=False)
        self._acts = itertools.chain([replace(act, kind="leave", pause_s=1.5)], self._acts)

    def _hang_up(self, act: Act) -> None:
        self._say(Act(act.number, act.kind, end=True, on_overlap="interrupt" if act.choice % 2 else None))

    def _fall_silent(self, act: Act) -> None:
        """Her next act is longer away than any idle time that is drawn small."""
        self._world.after(4.0 + act.choice % 10, lambda: None)
        self._acts = itertools.chain([replace(act, kind="keep_alive", pause_s=4.0 + act.choice % 10)], self._acts)

    # ---- what she sends ------------------------------------------------------------------------------------------

    def _request(self, act: Act, *, start: bool, **options: Any) -> ModelInferRequest:
        said = {"max_tokens": act.max_tokens, "session_key": self.person.key, "on_overlap": act.on_overlap}
        said |= {"deadline_ms": act.deadline_ms, **_as_json(act.sampling)}
        if act.kept_eighths is not None and not start:
            said["rewind_to"] = -(-self._context_len * act.kept_eighths // 8)
        if start and not options.get("resume"):
            said |= {"session_priority": act.priority or None}
            said.setdefault("seed", None if "fork_of" in options else self.person.seed)
            if act.is_windowed:
                said |= {"overflow": "window", "sink_tokens": SINK_TOKENS, "window_tokens": WINDOW_TOKENS}
        said |= options
        tensor = input_of(act)
        if act.is_numbered and not (start and not options.get("resume")):
            said.setdefault("turn", self._next_number)
        elif act.is_numbered:
            said.setdefault("turn", 0)
        request_id = str(next(self._request_ids))
        request = build_request("streaming_llm", request_id, self._session_id, tensor, said)
        if start:
            mark_start(request)
        if act.end:
            mark_end(request)
        return request

    def _send_again(self, request: ModelInferRequest, *, resumes: bool) -> None:
        again = ModelInferRequest()
        again.CopyFrom(request)
        again.id = str(next(self._request_ids))
        if resumes:
            again.parameters["sequence_start"].bool_param = True
            again.parameters["resume"].bool_param = True
        self._write(again, None)

    def _send(self, request: ModelInferRequest, act: Act) -> None:
        number = None
        if "turn" in request.parameters:
            number = request.parameters["turn"].int64_param
            self._numbered = [*self._numbered[-7:], request]
        if number is not None or act.ids or act.text or act.num_embeds or act.max_tokens or act.end:
            self._next_number = self._next_number + 1
        self._write(request, number)

    def _write(self, request: ModelInferRequest, number: int | None, *, is_waited_for: bool = True) -> None:
        if self._stream is None or not self._stream.is_open:
            self._forget_sent()
            self._num_streams += 1
            self._stream = self._connect(request_session(request), self._hear, partial(self._lost, self._num_streams))
        if self._stream is None:
            self._world.say(f"{self._name} finds no server")
            return
        if not is_waited_for:
            self._stream.send(request)
            return
        self._world.say(f"{self._name} {_told(request)}")
        wait = self._waiting.begin(f"{self._name}'s {_told(request)}")
        self._sent[request.id] = _Sent(request, wait, number, [])
        self._world.after(_PATIENCE_S, partial(self._lose_patience, self._stream))
        self._stream.send(request)

    # ---- what she hears ------------------------------------------------------------------------------------------

    def _hear(self, message: ModelStreamInferResponse) -> None:
        response = read_response(message)
        sent = self._sent.get(response.request_id)
        if sent is None and self._is_flooding:
            return
        if sent is None:
            raise Broken("answers once", f"{self._name} hears of {response.request_id} again: {message}")
        sent.ids += response.ids
        if response.error is None and not response.is_final:
            return
        del self._sent[response.request_id]
        self._waiting.end(sent.wait)
        if response.error is not None:
            self._world.say(f"{self._name}'s {response.request_id} is refused: {response.error}")
            self._is_refused(sent, response.error)
        elif response.status is not None:
            status = response.status
            self._world.say(f"{self._name}'s {response.request_id} ends: {status.finish_reason} {status.context_len}")
            self._context_len = status.context_len
            if len(sent.ids) != status.usage.output_tokens:
                raise Broken("wire", f"{len(sent.ids)} ids of {status.usage.output_tokens} arrived")

    def _is_refused(self, sent: _Sent, error: MicroturnError) -> None:
        if isinstance(error, FailedPrecondition) and "turn" in error.details:
            self._next_number = error.details["turn"]
        elif isinstance(error, NotFound) and "START flag" in str(error):
            self._world.after(_RETRY_S, partial(self._send_again, sent.request, resumes=True))

    def _lose_patience(self, stream: Stream) -> None:
        """Nothing comes on a stream from which something should; it may be dead."""
        if stream is self._stream and self._sent and not stream.is_whole:
            self._leave_stream()

    def _lost(self, number: int) -> None:
        if number == self._num_streams:
            self._stream = None
            self._forget_sent()

    def _leave_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._forget_sent()

    def _forget_sent(self) -> None:
        for sent in self._sent.values():
            self._waiting.end(sent.wait)
        self._sent.clear()


def request_session(request: ModelInferRequest) -> int | str:
    """Whose request it is."""
    parameter = request.parameters["sequence_id"]
    return parameter.string_param or parameter.int64_param


def input_of(act: Act) -> InputTensor:
    if act.num_embeds:
        rows = np.arange(act.num_embeds * HIDDEN_SIZE, dtype=np.float32).reshape(-1, HIDDEN_SIZE) + act.choice
        return encode_input(rows)
    return encode_input(act.ids if act.text is None else act.text)


def _as_json(sampling: dict[str, Any]) -> dict[str, Any]:
    return dict(sampling)


def _told(request: ModelInferRequest) -> str:
    said = request.parameters
    flags = [name for name in ("sequence_start", "sequence_end") if name in said and said[name].bool_param]
    options = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in sorted(said.items())
        if not name.startswith(("sequence_", "triton_")) and value.WhichOneof("parameter_choice")
    }
    given = request.inputs[0]
    return f"{request.id} of {request_session(request)} {' '.join(flags)} {given.name}{list(given.shape)} {options}"
