"""A copy of some pages in host memory, with all layers that the pages hold.

It consists of blocks, each with some pages of the image, part by part::

    block 0:  part 0 of page 0, 1, 2 | part 1 of page 0, 1, 2 | …
    block 1:  part 0 of page 3, 4    | part 1 of page 3, 4    | …

In pageable memory one block holds all pages: small pieces would fragment the heap. Pinned memory is slow to allocate,
so that there all blocks have one size and are reused. The format in a file is the same either way: part 0 of all pages,
part 1 of all pages, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.transfer import DONE, Transfer


@dataclass(frozen=True)
class PagePart:
    """The part of a page that lies in one tensor of the cache.

    Attributes:
        shape: of the part, without the axis of the pages.
        dtype: of its elements.
        scales: tells what these have been divided by, if they have (see `KVTensors.scales`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: str = ""

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def _bytes_of(pages: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = pages.view(-1).view(torch.uint8).numpy()
    return array


class BlockLayout:
    """Where the parts of some pages lie in one buffer.

    Wide elements come first, so that all are aligned without gaps, which a safetensors file must not have.

    Attributes:
        parts: what a page consists of.
        num_pages: capacity in pages.
        order: the parts' numbers in the order in which they lie.
        offsets: byte offset of each part, by its number.
        num_bytes: of all parts.
    """

    def __init__(self, parts: Sequence[PagePart], num_pages: int) -> None:
        self.parts = tuple(parts)
        self.num_pages = num_pages
        self.order = sorted(range(len(parts)), key=lambda number: -parts[number].dtype.itemsize)
        self.offsets = [0] * len(parts)
        self.num_bytes = 0
        for number in self.order:
            self.offsets[number] = self.num_bytes
            self.num_bytes += num_pages * parts[number].num_bytes

    def views(self, buffer: Tensor, num_pages: int) -> list[Tensor]:
        """The first pages of a block, one view [num_pages, *shape] per part.

        Args:
            buffer: uint8 [num_bytes].
            num_pages: how many.
        """
        return [
            buffer[start : start + num_pages * part.num_bytes].view(part.dtype).view(num_pages, *part.shape)
            for start, part in zip(self.offsets, self.parts, strict=True)
        ]


class KVImage:
    """Pages in host memory, not initialised.

    Attributes:
        num_pages: how many.
        num_bytes: of their content.
        parts: what a page consists of.
        offsets: byte offset of each part in `contents`.
        buffers: uint8 [bytes], one per block.
        store_transfer: the latest store transfer from the cache into this image; only the engine thread starts one.

    Args:
        parts: what a page consists of.
        num_pages: how many.
        pages_per_block: capacity of a block; None puts all pages into one block.
        new_buffer: allocates a block, uint8 [bytes], given its size; None allocates pageable memory.
    """

    def __init__(
        self,
        parts: Sequence[PagePart],
        num_pages: int,
        *,
        pages_per_block: int | None = None,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        layout = BlockLayout(parts, num_pages if pages_per_block is None else pages_per_block)
        self.parts = layout.parts
        self.store_transfer: Transfer = DONE
        self._order = layout.order
        self._layout = layout
        self._set_num_pages(num_pages)
        num_blocks = max(1, -(-num_pages // max(1, layout.num_pages)))
        if new_buffer is None:
            new_buffer = partial(torch.empty, dtype=torch.uint8)
        self.buffers: list[Tensor] = [new_buffer(layout.num_bytes) for _ in range(num_blocks)]

    def _set_num_pages(self, num_pages: int) -> None:
        whole = BlockLayout(self.parts, num_pages)
        self.num_pages, self.num_bytes, self.offsets = num_pages, whole.num_bytes, whole.offsets

    def resize(self, num_pages: int) -> bool:
        """Has another number of pages from now on; those that it had stay. False if its one block is too small."""
        assert len(self.buffers) == 1, "an image of several blocks has the size that it was made with"
        if num_pages > self._layout.num_pages:
            return False
        self._set_num_pages(num_pages)
        self.__dict__.pop("blocks", None)
        return True

    @cached_property
    def blocks(self) -> list[list[Tensor]]:
        """Per block and part, [pages in the block, *shape]: views of the buffers.

        Not needed to copy whole blocks: a large image has thousands of these views.
        """
        room = self._layout.num_pages
        return [
            self._layout.views(buffer, min(room, self.num_pages - number * room))
            for number, buffer in enumerate(self.buffers)
        ]

    def contents(self, first: int = 0) -> Iterator[memoryview]:
        """The bytes of all pages from the first one on, piece by piece, readable and writable; part after part.

        It waits for the store transfer.
        """
        self.store_transfer.wait()
        room = self._layout.num_pages
        for number in self._order:
            for place, block in enumerate(self.blocks):
                yield _bytes_of(block[number][max(0, first - place * room) :]).data

    def first(self, num_pages: int, new_image: Callable[[int], KVImage]) -> KVImage:
        """A copy of the first pages in a new image; waits for the store transfer."""
        image = new_image(num_pages)
        image.fill(0, self, num_pages)
        return image

    def fill_with(self, pieces: Iterable[tuple[KVImage, int]]) -> None:
        """Copies the first pages of images, so many of each, one behind the other."""
        first = 0
        for source, num_pages in pieces:
            self.fill(first, source, num_pages)
            first += num_pages

    def fill(self, first: int, source: KVImage, num_pages: int) -> None:
        """Copies the first pages of another image, of the same parts, to index `first` on; waits for its transfer."""
        source.store_transfer.wait()
        there, here = source._layout.num_pages, self._layout.num_pages
        at = 0
        while at < num_pages:
            from_block, from_page = divmod(at, there)
            to_block, to_page = divmod(first + at, here)
            length = min(num_pages - at, there - from_page, here - to_page)
            for part, target in zip(source.blocks[from_block], self.blocks[to_block], strict=True):
                # Not by torch: a thread of its own would get an OpenMP team, beside that of the steps.
                np.copyto(
                    _bytes_of(target[to_page : to_page + length]), _bytes_of(part[from_page : from_page + length])
                )
            at += length
