"""What Triton's Python backend offers a model, as far as the adapter uses it: requests, tensors, response senders.

It stands for `triton_python_backend_utils`, which exists inside Triton only; `install` puts it in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """Why a model cannot be loaded."""


class TritonError(Exception):
    """Why a request fails."""


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class InferenceResponse:
    """Some tensors, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.output_tensors = list(output_tensors)
        self.error = error


class ResponseSender:
    """The way back of one request.

    Args:
        send: takes a response, and whether it is the last.
        is_cancelled: says whether the client is gone.
    """

    def __init__(self, send: Callable[[InferenceResponse, bool], None], is_cancelled: Callable[[], bool]) -> None:
        self._send = send
        self.is_cancelled = is_cancelled
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self._is_closed, "a response after the final flag"
        self._is_closed = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._send(InferenceResponse() if response is None else response, self._is_closed)


class InferenceRequest:
    """A request as a model sees it."""

    def __init__(
        self,
        request_id: str,
        correlation_id: int | str,
        flags: int,
        parameters: str,
        inputs: Sequence[Tensor],
        sender: ResponseSender,
    ) -> None:
        self.request_id = lambda: request_id
        self.correlation_id = lambda: correlation_id
        self.flags = lambda: flags
        self.parameters = lambda: parameters
        self.inputs = lambda: list(inputs)
        self.get_response_sender = lambda: sender
        self.is_cancelled = sender.is_cancelled


def install() -> None:
    """Has `import triton_python_backend_utils` find this module."""
    sys.modules.setdefault("triton_python_backend_utils", sys.modules[__name__])
