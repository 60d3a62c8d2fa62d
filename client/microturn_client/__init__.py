"""Client for Microturn streaming sessions: chunks in, tokens out, over one gRPC stream per session."""

from microturn_client._aio import AsyncClient, AsyncSession, AsyncTurn
from microturn_client._errors import (
    ConnectionLost,
    ContextFull,
    DeadlineExceeded,
    Expired,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    MicroturnError,
    NotFound,
    PermissionDenied,
    ProtocolError,
    ResourceExhausted,
    SessionClosed,
    TurnTimeout,
    Unavailable,
)
from microturn_client._events import Event, Status, Timing, Tokens, TurnEnd, Usage
from microturn_client._inputs import TurnInput
from microturn_client._model_info import Limits, ModelInfo
from microturn_client._options import AppendOptions, GenerationOptions, SessionOptions, TurnOptions
from microturn_client._sync import Client, Session, Turn
from microturn_client._wire import SessionId

__all__ = [
    "AppendOptions",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "Client",
    "ConnectionLost",
    "ContextFull",
    "DeadlineExceeded",
    "Event",
    "Expired",
    "FailedPrecondition",
    "GenerationOptions",
    "InternalError",
    "InvalidArgument",
    "Limits",
    "MicroturnError",
    "ModelInfo",
    "NotFound",
    "PermissionDenied",
    "ProtocolError",
    "ResourceExhausted",
    "Session",
    "SessionClosed",
    "SessionId",
    "SessionOptions",
    "Status",
    "Timing",
    "Tokens",
    "Turn",
    "TurnEnd",
    "TurnInput",
    "TurnOptions",
    "TurnTimeout",
    "Unavailable",
    "Usage",
]
