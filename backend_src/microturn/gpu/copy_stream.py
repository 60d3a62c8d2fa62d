"""Work that a GPU does beside its steps, one piece after the other: a CUDA stream. Knows no pages and no images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from microturn.kv_transfer import Transfer


class CopyStream(Protocol):
    """Work in an order of its own. Nothing here waits on the host."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Adds a piece of work: what this enqueues on the GPU when it is called."""
        ...

    def follow_steps(self) -> None:
        """What is added from now on comes after all steps that have been handed over."""
        ...

    def follow(self, transfer: Transfer) -> None:
        """What is added from now on comes after a copy on another stream."""
        ...

    def mark(self) -> Transfer:
        """Done when all is done that has been added so far."""
        ...


class CudaTransfer:
    """What has been recorded on a stream up to here.

    Args:
        event: recorded there.
        device: the GPU. Its current stream, in the engine's thread, is that of the steps.
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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits leaves the core to others
        event.record(self._stream)
        return CudaTransfer(event, self._device)
