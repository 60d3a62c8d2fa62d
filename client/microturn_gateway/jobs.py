"""What one event of a realtime client makes its session do."""

from __future__ import annotations

from dataclasses import dataclass

from microturn_client import Status
from microturn_gateway.answer import Response
from microturn_gateway.client_events import ClientEvent
from microturn_gateway.conversation import Conversation
from microturn_gateway.session_config import SessionConfig


@dataclass
class Job:
    """An event that waits, or is being done.

    Attributes:
        config: of the session when the event came.
        is_implied: another event brought it with it.
        latency_ms: of its turns until now.
        status: of the last of them.
        before: the conversation without it.
    """

    event: ClientEvent
    event_id: str | None
    config: SessionConfig
    response: Response | None = None
    is_implied: bool = False
    latency_ms: float = 0.0
    status: Status | None = None
    before: Conversation | None = None
