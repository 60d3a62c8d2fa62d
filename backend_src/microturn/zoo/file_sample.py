"""Some blocks of a file that stand for all of it: gigabytes are not read at every start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 64


def blocks(file: BinaryIO, num_bytes: int, *, first: int = 0) -> Iterator[bytes]:
    """64 blocks of 4 KiB, evenly spread.

    Args:
        file: of `num_bytes`.
        num_bytes: its size.
        first: where the first block begins; the last one ends with the file.
    """
    last = max(first, num_bytes - _BLOCK_BYTES)
    for number in range(_NUM_BLOCKS):
        file.seek(first + (last - first) * number // (_NUM_BLOCKS - 1))
        yield file.read(_BLOCK_BYTES)
