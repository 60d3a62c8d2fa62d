"""Client for Microturn streaming sessions: chunks in, tokens out, over one gRPC stream per session."""

from microturn_client._aio import AsyncClient
from microturn_client._aio_session import AsyncSession
from microturn_client._aio_turn import AsyncTurn
from microturn_client._beat import Beat
from microturn_client._errors import (
    ConnectionLost,
    ContextFull,
    DeadlineExceeded,
    ErrorCode,
    Expired,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    MicroturnError,
    ModelChanged,
    NotFound,
    PermissionDenied,
    ProtocolError,
    ResourceExhausted,
    SessionClosed,
    TurnTimeout,
    Unavailable,
)
from microturn_client._events import Answer, Event, FinishReason, Resumed, Status, Timing, Tokens, TurnEnd, Usage
from microturn_client._inputs import SupportsDLPack, TurnInput
from microturn_client._model_info import Limits, ModelInfo
from microturn_client._options import (
    AppendOptions,
    GenerationOptions,
    History,
    MessageRole,
    OnOverlap,
    Overflow,
    SessionOptions,
    TurnOptions,
)
from microturn_client._retry import Recovery
from microturn_client._sync import Client
from microturn_client._sync_session import Session
from microturn_client._sync_turn import Turn
from microturn_client._tool_events import ToolArguments, ToolCall, ToolCallBegun, ToolEvent
from microturn_client._transcript import TranscriptTurn
from microturn_client._version import __version__ as __version__
from microturn_client._wire import SessionId

__all__ = [
    "Answer",
    "AppendOptions",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "Beat",
    "Client",
    "ConnectionLost",
    "ContextFull",
    "DeadlineExceeded",
    "ErrorCode",
    "Event",
    "Expired",
    "FailedPrecondition",
    "FinishReason",
    "GenerationOptions",
    "History",
    "InternalError",
    "InvalidArgument",
    "Limits",
    "MessageRole",
    "MicroturnError",
    "ModelChanged",
    "ModelInfo",
    "NotFound",
    "OnOverlap",
    "Overflow",
    "PermissionDenied",
    "ProtocolError",
    "Recovery",
    "ResourceExhausted",
    "Resumed",
    "Session",
    "SessionClosed",
    "SessionId",
    "SessionOptions",
    "Status",
    "SupportsDLPack",
    "Timing",
    "Tokens",
    "ToolArguments",
    "ToolCall",
    "ToolCallBegun",
    "ToolEvent",
    "TranscriptTurn",
    "Turn",
    "TurnEnd",
    "TurnInput",
    "TurnOptions",
    "TurnTimeout",
    "Unavailable",
    "Usage",
]
