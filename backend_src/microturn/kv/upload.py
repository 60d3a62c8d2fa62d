"""Copies tensors from the host to the model's device without waiting for its queued work."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device; on a CPU it returns the tensor itself.

    A GPU copies it asynchronously, after the queued work, from pinned memory that torch keeps until then.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
