"""A copy of some pages outside the pool: all that stands in them, of all layers in them, in one piece of host memory.

One piece, so that it comes from the operating system and goes back to it whole (small pieces would leave holes in the
heap), and so that a file of it is written and checked in one go. Knows shapes and bytes; knows no page ids, no sessions
and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagePart:
    """What one tensor of the cache holds of a page.

    Attributes:
        shape: of the page's part, without the axis of the pages.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class KVImage:
    """Pages in host memory, not initialised.

    Attributes:
        buffer: uint8 [num_bytes], all of it.
        tensors: one per part, [num_pages, *shape]: views of the buffer.
        offsets: where each tensor begins in the buffer, in bytes.

    Args:
        parts: what a page consists of.
        num_pages: how many.
        is_pinned: whether a GPU copies to and from this memory by itself.
    """

    def __init__(self, parts: Sequence[PagePart], num_pages: int, *, is_pinned: bool = False) -> None:
        self.num_pages = num_pages
        self.num_bytes = num_pages * sum(part.num_bytes for part in parts)
        self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.offsets = [0] * len(parts)
        self.tensors: list[Tensor] = [torch.empty(0)] * len(parts)
        start = 0
        # Wide elements first: so all of them are aligned without gaps, which a safetensors file must not have.
        for index in sorted(range(len(parts)), key=lambda index: -parts[index].dtype.itemsize):
            part = parts[index]
            end = start + num_pages * part.num_bytes
            self.offsets[index] = start
            self.tensors[index] = self.buffer[start:end].view(part.dtype).view(num_pages, *part.shape)
            start = end

    def part(self, first: int, last: int) -> list[Tensor]:
        """Views of the pages from `first` to before `last`, one per part."""
        return [tensor[first:last] for tensor in self.tensors]

    def first(self, num_pages: int, new_image: Callable[[int], KVImage]) -> KVImage:
        """A copy of the first pages alone, in an image that is made for it."""
        image = new_image(num_pages)
        for source, target in zip(self.part(0, num_pages), image.tensors, strict=True):
            target.copy_(source)
        return image
