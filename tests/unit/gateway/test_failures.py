"""Every error of the client library has a place in OpenAI's shape."""

from __future__ import annotations

import pytest

from microturn_client import ContextFull, MicroturnError, ResourceExhausted
from microturn_gateway.failures import from_client, of_request


def kinds(error: type[MicroturnError]) -> list[type[MicroturnError]]:
    return [kind for child in error.__subclasses__() for kind in (child, *kinds(child))]


@pytest.mark.parametrize("kind", kinds(MicroturnError))
def test_every_error_has_a_status(kind: type[MicroturnError]) -> None:
    refusal = from_client(kind("what to do"))
    assert refusal.as_json() == {
        "type": refusal.type,
        "code": kind.code.lower(),
        "message": "what to do",
        "param": None,
    }
    assert 400 <= refusal.http_status < 600


def test_when_to_come_back_is_told() -> None:
    refusal = from_client(ResourceExhausted("later", {"retry_after_ms": 1500}))
    assert (refusal.http_status, refusal.type, refusal.retry_after_s) == (429, "rate_limit_error", 1.5)


def test_a_full_context_is_told_in_the_words_that_frameworks_know() -> None:
    """LangChain goes by the code; LiteLLM and CrewAI go by the words."""
    refusal = of_request(ContextFull("send less"))
    assert (refusal.http_status, refusal.code) == (400, "context_length_exceeded")
    assert refusal.message == "This model's maximum context length is exceeded: send less"
    assert of_request(ResourceExhausted("later")).as_json() == from_client(ResourceExhausted("later")).as_json()
