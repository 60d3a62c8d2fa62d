"""Numbers from the host to where the model computes, without waiting for what is under way there."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; on a CPU the tensor itself.

    A GPU reads it by itself, behind what has been enqueued, out of pinned memory that torch keeps until then.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
