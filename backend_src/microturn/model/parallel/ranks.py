"""The processes that share a model, and what they tell each other in a pass."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# Of a rank that is there and does not answer; one that has gone is noticed by its process. A first pass may compile.
_TIMEOUT = datetime.timedelta(minutes=10)
_LOOPBACK = "lo"


class Ranks:
    """The processes of a model on one machine; all of them call the same methods in the same order.

    They are torch's default process group, of which a process has one: of gloo over loopback, or of NCCL.

    Attributes:
        rank: of this process; 0 leads.
        size: number of the processes.
        device: of this process.

    Args:
        place: a file that they find each other by, empty before the first one comes.
        rank: see above, and `size` likewise.
        kind: of the devices, ``cpu`` or ``cuda``: each rank has the GPU of its number.

    Raises:
        RuntimeError: the others do not come; from the methods also where one has gone.
    """

    def __init__(self, place: Path, rank: int, size: int, kind: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            f"file://{place}",
            _TIMEOUT,
            size,
            rank,
            device_id=self.device if kind == "cuda" else None,
        )

    def leave(self) -> None:
        """Ends the group here, so that this process may become one of another; NCCL's would wait for the others."""
        if self.device.type == "cpu":
            dist.destroy_process_group()

    def add(self, part: Tensor) -> Tensor:
        """Replaces this rank's part of a sum by the sum, and returns it.

        On a CPU parts are added in the order of the ranks, whatever their number: a ring adds the elements of a tensor
        in an order that depends on where they lie, so that a token would depend on its company.
        """
        if part.is_cuda:
            dist.all_reduce(part)
            return part
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
        """Sends a contiguous tensor to another rank, which receives it."""
        dist.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Writes what another rank sends into a contiguous tensor, and returns it."""
        dist.recv(tensor, rank)
        return tensor


def place_of(descriptor: int) -> Path:
    """The place of a file that has no name, by its descriptor here."""
    return Path(f"/proc/self/fd/{descriptor}")
