"""Tests of _model_info: what a config says, and what none says."""

from __future__ import annotations

import pytest
from tritonclient.grpc import model_config_pb2

from microturn_client import Limits, ModelInfo, ProtocolError
from microturn_client._model_info import parse_model_info


def config(**parameters: str) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig(name="a-model")
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    return config


def test_what_is_published_is_read() -> None:
    limits = '{"max_context": 8192, "max_sessions": 256, "idle_timeout_s": 60.0, "max_of_tomorrow": 1}'
    info = parse_model_info(
        config(protocol_version="1", model_name="smollm2-135m", model_fingerprint="ab", limits=limits, page_size="16")
    )
    assert info == ModelInfo(1, "smollm2-135m", "ab", Limits(max_context=8192, max_sessions=256, idle_timeout_s=60.0))


def test_what_is_not_said_is_none() -> None:
    """As on a Triton into which somebody copied the model."""
    info = parse_model_info(config(protocol_version="1", model_name="", model_fingerprint="", limits=""))
    assert info == ModelInfo(1, None, None, Limits())


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"protocol_version": "one"},
        {"protocol_version": "1", "limits": "{"},
        {"protocol_version": "1", "limits": "[]"},
        {"protocol_version": "1", "limits": '{"max_context": "8192"}'},
        {"protocol_version": "1", "limits": '{"max_sessions": true}'},
    ],
)
def test_what_is_no_streaming_model_is_said_to_be_none(parameters: dict[str, str]) -> None:
    with pytest.raises(ProtocolError, match="'a-model' is no streaming model"):
        parse_model_info(config(**parameters))
