"""A stream between a client and a server: in order, late, and not for ever. Knows no turns.

What is on the way arrives in its order, each message a little later than it was sent and some of them much later. A
stream *breaks*: both ends hear of it, the server a little later. Or it goes *mute*: nothing gets through any more, and
nobody hears of that but by its silence. What its client does not read waits at the server, as Triton lets it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from simulation.world import World

# A cancelled call is known to Triton after so long; a connection that is dead without a word after that long.
_CANCEL_S = 0.05
_DEAD_S = 20.0

_CODE = re.compile("[A-Z_]+: ")


@dataclass(frozen=True)
class Delays:
    """How long messages take.

    Attributes:
        usual_s: most of them, about.
        late_s: the others, at most.
        late_share: how many these are.
    """

    usual_s: float = 0.002
    late_s: float = 0.0
    late_share: float = 0.0

    def draw(self, random: Random) -> float:
        """The time of one message."""
        if random.random() < self.late_share:
            return random.uniform(0.0, self.late_s)
        return self.usual_s * random.uniform(0.5, 2.0)


class Listener(Protocol):
    """Who holds the server's end of streams."""

    def receive(self, stream: Stream, request: ModelInferRequest) -> None: ...

    def forget(self, stream: Stream) -> None: ...


class Stream:
    """One gRPC call.

    Attributes:
        is_reading: whether the client takes what comes.
        is_cancelled: whether the server knows that nobody is there any more.
        num_unread_bytes: what waits at the server.
        opened_s: since when it is there.
        num_paid: responses on it that cost a forward pass.
        clients: who has spoken on it: sessions, each with the keys that were said.
        survives_loss: the client asks again for what it does not hear.

    Args:
        world: the clock.
        server: who is called.
        random: of its delays.
        delays: how long they are.
        on_message: the client's ear.
        on_broken: the client hears that the stream is gone.
    """

    def __init__(
        self,
        world: World,
        server: Listener,
        random: Random,
        delays: Delays,
        on_message: Callable[[ModelStreamInferResponse], None],
        on_broken: Callable[[], None],
    ) -> None:
        self.is_reading = True
        self.is_cancelled = False
        self.num_unread_bytes = 0
        self.survives_loss = False
        self.opened_s = world.now_s
        self.num_paid = 0
        self.clients: set[tuple[str, str]] = set()
        self._world = world
        self._server = server
        self._random = random
        self._delays = delays
        self._on_message = on_message
        self._on_broken = on_broken
        self._is_open = True
        self._is_mute = False
        self._num_to_lose = 0
        self._lost_ids: set[str] = set()
        self._unread: deque[ModelStreamInferResponse] = deque()
        self._up_at_s = self._down_at_s = 0.0

    # ---- the client's end ----------------------------------------------------------------------------------------

    def send(self, request: ModelInferRequest) -> None:
        """A request goes out."""
        said = request.parameters
        key = said["session_key"].string_param if "session_key" in said else ""
        self.clients.add((str(said["sequence_id"]), key))
        self._up_at_s = max(self._up_at_s, self._world.now_s + self._delays.draw(self._random))
        self._world.at(self._up_at_s, lambda: self._arrive(request))

    def read(self, *, goes_on: bool) -> None:
        """The client reads on, or stops reading."""
        self.is_reading = goes_on
        self._pump()

    def close(self) -> None:
        """The client leaves."""
        if self._is_open:
            self._is_open = False
            self._world.after(_DEAD_S if self._is_mute else _CANCEL_S, self._is_known)

    # ---- the server's end ----------------------------------------------------------------------------------------

    def deliver(self, message: ModelStreamInferResponse) -> None:
        """A response goes out."""
        request_id = message.infer_response.id
        if self._num_to_lose and request_id not in self._lost_ids:
            self._num_to_lose -= 1
            self._lost_ids.add(request_id)
        if request_id in self._lost_ids:
            return
        if self._is_open and not self._is_mute:
            self.num_paid += not _is_free(message)
            self._unread.append(message)
            self.num_unread_bytes += message.ByteSize()
            self._pump()

    # ---- what goes wrong -----------------------------------------------------------------------------------------

    @property
    def num_unread_free(self) -> int:
        """Responses of the model's that wait at the server and have no tokens: what a client can have for nothing."""
        return sum(_is_free(message) for message in self._unread)

    @property
    def is_open(self) -> bool:
        """Whether the client holds it."""
        return self._is_open

    @property
    def is_whole(self) -> bool:
        """Whether what is sent arrives."""
        return self._is_open and not self._is_mute

    def break_off(self) -> None:
        """Both ends lose it, and what is on the way."""
        if self._is_open:
            self.close()
            self._world.after(self._delays.draw(self._random), self._on_broken)

    def go_mute(self) -> None:
        """Nothing gets through any more; the server finds out in the end."""
        self._is_mute = True
        self._unread.clear()
        self.num_unread_bytes = 0
        self._world.after(_DEAD_S, self._is_known)

    def lose(self, num_answers: int) -> None:
        """What is still said in the next answers is lost, on a stream that lives."""
        self._num_to_lose += num_answers

    def _arrive(self, request: ModelInferRequest) -> None:
        if self._is_open and not self._is_mute:
            self._server.receive(self, request)

    def _pump(self) -> None:
        while self.is_reading and self._unread:
            message = self._unread.popleft()
            self.num_unread_bytes -= message.ByteSize()
            self._down_at_s = max(self._down_at_s, self._world.now_s + self._delays.draw(self._random))
            self._world.at(self._down_at_s, lambda message=message: self._hear(message))  # type: ignore[misc]

    def _hear(self, message: ModelStreamInferResponse) -> None:
        if self._is_open and not self._is_mute:
            self._on_message(message)

    def _is_known(self) -> None:
        self.is_cancelled = True
        self._unread.clear()
        self.num_unread_bytes = 0
        self._server.forget(self)


def _is_free(message: ModelStreamInferResponse) -> bool:
    """What Triton refuses by itself, in words of its own, no model can hold back."""
    if message.error_message and not _CODE.match(message.error_message):
        return False
    return all(output.name != "output_ids" for output in message.infer_response.outputs)
