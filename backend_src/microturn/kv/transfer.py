"""Copies between the host and the model's device that need not be waited for."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A copy between the pages of the cache and host memory."""

    def is_done(self) -> bool:
        """Whether the copy is complete."""
        ...

    def wait(self) -> None:
        """Blocks until the copy is complete; callable in any thread."""
        ...

    def precede_steps(self) -> None:
        """Makes every later step on the device wait for the copy. Does not block."""
        ...


class _Done:
    """A copy that was made synchronously."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def precede_steps(self) -> None:
        pass


DONE: Final[Transfer] = _Done()


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device; on a CPU it returns the tensor itself.

    A GPU copies it asynchronously, after the queued work, from pinned memory that torch keeps until then.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
