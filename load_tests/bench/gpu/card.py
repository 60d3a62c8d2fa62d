"""What a card's memory and its way to the host give, measured: the roof that everything else is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_NUM_ROUNDS, _PER_ROUND = 5, 4


@dataclass(frozen=True)
class Card:
    """Bytes per second.

    Attributes:
        read_bytes_per_s: large reads, the better of a sum and a product of a matrix with a vector.
        copy_bytes_per_s: large copies on the device, bytes read and bytes written.
        to_device_bytes_per_s: large copies from pinned memory of the host.
        to_host_bytes_per_s: likewise the other way.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        """The most that was seen: what a pass over weights and keys could have."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def measure_card(device: torch.device, num_bytes: int, num_host_bytes: int) -> Card:
    """Measures; everything is freed again.

    Args:
        device: the card; on a CPU the host's own memory takes its place.
        num_bytes: of a read and of a copy, far beyond any cache; twice as many must be free.
        num_host_bytes: of a copy between host and device, no more than those.
    """
    # Random numbers: a card is faster on zeros than on what it will meet.
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    width = 4096
    matrix = source[: len(source) // width * width].view(-1, width)
    vector = torch.rand(width, device=device)
    read_s = min(_best_s(device, source.sum), _best_s(device, lambda: torch.mv(matrix, vector)))
    copy_s = _best_s(device, lambda: target.copy_(source))
    is_cuda = device.type == "cuda"
    on_device = source.view(torch.uint8)[:num_host_bytes]
    host = torch.empty(num_host_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    host.copy_(on_device)
    to_device_s = _best_s(device, lambda: on_device.copy_(host, non_blocking=True))
    to_host_s = _best_s(device, lambda: host.copy_(on_device, non_blocking=True))
    return Card(num_bytes / read_s, 2 * num_bytes / copy_s, num_host_bytes / to_device_s, num_host_bytes / to_host_s)


def settle(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of some work, enqueued a few times at once: the best of several rounds."""
    best_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        settle(device)
        started_s = time.perf_counter()
        for _ in range(_PER_ROUND):
            work()
        settle(device)
        best_s = min(best_s, (time.perf_counter() - started_s) / _PER_ROUND)
    return best_s
