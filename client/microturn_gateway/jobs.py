"""What the events of a realtime client make its session do, and those of them that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from microturn_client import Status
from microturn_gateway.answer import Response
from microturn_gateway.client_events import AppendBuffer, ClientEvent
from microturn_gateway.context import joined
from microturn_gateway.conversation import Conversation
from microturn_gateway.failures import Refusal
from microturn_gateway.session_config import SessionConfig

_MAX_SIZE = 4_194_304  # characters that wait; as many as a request has
_SIZE_OF_ANY = 1024  # what a job holds beside the characters of its event
_MAX_BUFFER_LEN = 65_536  # characters or ids that wait for their beat


@dataclass
class Job:
    """An event that waits, or is being done.

    Attributes:
        config: of the session when the event came.
        size: characters of its event, and of those that made no job before it, such as updates of the configuration.
        is_implied: another event brought it with it.
        latency_ms: of its turns until now.
        status: of the last of them.
        before: the conversation without it.
        room: for its answer, as the server said where there is less than the gateway would give it.
    """

    event: ClientEvent
    event_id: str | None
    config: SessionConfig
    size: int = 0
    response: Response | None = None
    is_implied: bool = False
    latency_ms: float = 0.0
    status: Status | None = None
    before: Conversation | None = None
    room: int = 0


class WaitingJobs:
    """Jobs in the order of their events. The caller bounds them: while they are full, it takes no event."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    @property
    def first(self) -> Job | None:
        """The oldest one; None when none waits."""
        return self._jobs[0] if self._jobs else None

    @property
    def is_full(self) -> bool:
        """Whether no more than these should wait."""
        return self._size >= _MAX_SIZE

    def put(self, job: Job) -> None:
        """Adds one behind the others."""
        self._jobs.append(job)
        self._size += job.size + _SIZE_OF_ANY

    def take(self) -> Job:
        """The oldest one, which waits no longer."""
        job = self._jobs.popleft()
        self._size -= job.size + _SIZE_OF_ANY
        return job

    def join(self, event: AppendBuffer) -> bool:
        """Adds to text or ids that wait for their beat already; False where there are none.

        Raises:
            Refusal: it is too much.
        """
        waiting = self._jobs[-1] if self._jobs else None
        if waiting is None or not isinstance(waiting.event, AppendBuffer):
            if len(event.content) > _MAX_BUFFER_LEN:
                raise Refusal("buffer_full", "this is too much for one micro-turn: send less at a time")
            return False
        held = waiting.event.content
        if len(held) + len(event.content) > _MAX_BUFFER_LEN:
            raise Refusal("buffer_full", "too much waits for its beat: send it again later", http_status=429)
        content = joined(held, event.content)
        if content is not None:
            waiting.event = AppendBuffer(content)
        return content is not None
