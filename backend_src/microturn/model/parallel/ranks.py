"""The processes that share a model, and what they tell each other in a pass.

Sums are added in the order of the ranks, whatever their number: a ring, as gloo and NCCL have it, adds the elements of
a tensor in an order that depends on where they lie, so that a token would depend on its company.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# A pass is begun by all ranks at once: one that is so late will not come any more.
_TIMEOUT = datetime.timedelta(seconds=60)
_LOOPBACK = "lo"


class Ranks:
    """The processes of a model on one machine, over loopback; all of them call the same methods in the same order.

    They are torch's default process group, of which a process has one.

    Attributes:
        rank: of this process; 0 leads.
        size: number of the processes.

    Args:
        place: a file that they find each other by, empty before the first one comes.
        rank: see above, and `size` likewise.

    Raises:
        RuntimeError: the others do not come; from the methods also where one has gone.
    """

    def __init__(self, place: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=size, timeout=_TIMEOUT)

    def leave(self) -> None:
        """Ends the group here; this process may become one of another."""
        dist.destroy_process_group()

    def add(self, part: Tensor) -> Tensor:
        """Replaces this rank's part of a sum by the sum, and returns it."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        torch.add(parts[0], parts[1], out=part)
        for other in parts[2:]:
            part.add_(other)
        return part

    def share(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by that of rank 0, and returns it."""
        dist.broadcast(tensor, 0)
        return tensor

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        """The parts of all ranks, as large as this one's, at rank 0; nothing elsewhere."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts)
        return parts or []

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends the bytes of a contiguous tensor to another rank, which receives them."""
        dist.send(_bytes_of(tensor), rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Writes what another rank sends into a contiguous tensor."""
        dist.recv(_bytes_of(tensor), rank)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def place_of(descriptor: int) -> Path:
    """The place of a file that has no name, by its descriptor here."""
    return Path(f"/proc/self/fd/{descriptor}")
