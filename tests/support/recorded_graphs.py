"""CUDA graphs on a CPU: what is captured is a list of operations on memory, and a replay does these and nothing else.

So what a pass took from the host when it was captured stays as it was then, as in a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    recording: RecordedGraph | None = None
    num_replays = 0

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], Any]] = []

    def add(self, call: Callable[[], Any], result: Any) -> None:
        self._calls.append((call, result))

    def replay(self) -> None:
        RecordedGraph.num_replays += 1
        for call, result in self._calls:
            for written, again in zip(_tensors(result), _tensors(call()), strict=True):
                if written is not again:
                    written.copy_(again)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these in the place of torch's, and lets CUDA's streams do nothing."""
    monkeypatch.setattr(RecordedGraph, "num_replays", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: _Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)


def kernel(function: F) -> F:
    """Marks what is one operation on the device, whatever a plain stand-in for it does on the host."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        graph = RecordedGraph.recording
        if graph is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            RecordedGraph.recording = None
            result = function(*args, **kwargs)
            RecordedGraph.recording = graph
        graph.add(partial(function, *args, **kwargs), result)
        return result

    return run  # type: ignore[return-value]


class _Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert RecordedGraph.recording is not None
        RecordedGraph.recording.add(partial(func, *args, **(kwargs or {})), result)
        return result


@contextmanager
def _capture(graph: RecordedGraph, pool: None) -> Iterator[None]:  # noqa: ARG001  torch.cuda.graph has it
    RecordedGraph.recording = graph
    try:
        with _Recorder():
            yield
    finally:
        RecordedGraph.recording = None


class _Stream:
    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, tuple | list) else []
