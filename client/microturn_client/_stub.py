"""The calls of KServe's inference service that the client makes. Knows no sessions."""

from __future__ import annotations

from typing import Any

from microturn_client._messages_pb2 import (
    ModelConfigRequest,
    ModelConfigResponse,
    ModelInferRequest,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStreamInferResponse,
)

_SERVICE = "/inference.GRPCInferenceService/"


class InferenceStub:
    """Calls on one channel.

    Attributes:
        stream_infer: the stream of a session's turns.
        model_config: asks for a model's config.
        model_ready: asks whether a model takes turns.

    Args:
        channel: of ``grpc`` or of ``grpc.aio``; the calls are of its kind.
    """

    def __init__(self, channel: Any) -> None:
        self.stream_infer = channel.stream_stream(
            f"{_SERVICE}ModelStreamInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelStreamInferResponse.FromString,
        )
        self.model_config = channel.unary_unary(
            f"{_SERVICE}ModelConfig",
            request_serializer=ModelConfigRequest.SerializeToString,
            response_deserializer=ModelConfigResponse.FromString,
        )
        self.model_ready = channel.unary_unary(
            f"{_SERVICE}ModelReady",
            request_serializer=ModelReadyRequest.SerializeToString,
            response_deserializer=ModelReadyResponse.FromString,
        )
