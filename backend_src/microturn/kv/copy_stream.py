"""A CUDA stream for copies beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from microturn.kv.transfer import Transfer


class CopyStream(Protocol):
    """An ordered queue of GPU work. No method blocks the host."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Enqueues on this stream the GPU work that `work` launches."""
        ...

    def follow_steps(self) -> None:
        """Makes later work wait for all steps enqueued so far."""
        ...

    def follow(self, transfer: Transfer) -> None:
        """Makes later work wait for a transfer on another stream."""
        ...

    def mark(self) -> Transfer:
        """A transfer that is done when all work added so far is done."""
        ...


class CudaTransfer:
    """A `Transfer` that ends at a recorded CUDA event.

    Args:
        event: recorded on the copy stream.
        device: the GPU. In the engine thread its current stream is the stream of the steps.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def precede_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaCopyStream:
    """A `CopyStream` of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def follow_steps(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, transfer: Transfer) -> None:
        if isinstance(transfer, CudaTransfer):
            self._stream.wait_event(transfer.event)

    def mark(self) -> Transfer:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # `wait` yields its core
        event.record(self._stream)
        return CudaTransfer(event, self._device)
