"""A copy of some pages outside the pool: all that stands in them, of all layers in them, in host memory.

It consists of blocks, in each of which some pages of the image lie, part by part::

    block 0:  part 0 of page 0, 1, 2 | part 1 of page 0, 1, 2 | …
    block 1:  part 0 of page 3, 4    | part 1 of page 3, 4    | …

Where memory comes from the operating system, one block holds all pages: small pieces would leave holes in the heap.
Memory that a GPU copies to and from by itself is dear to get, so there all blocks are of one size and are used again.
What stands in a file is the same either way: part 0 of all pages, part 1 of all pages, and so on.

Knows shapes and bytes; knows no page ids, no sessions and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from microturn.kv_transfer import DONE, Transfer


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


class BlockLayout:
    """Where the parts of so many pages lie in one piece of memory.

    Wide elements come first: so all of them are aligned without gaps, which a safetensors file must not have.

    Attributes:
        parts: what a page consists of.
        num_pages: how many pages there is room for.
        order: the parts by their numbers, as they lie.
        offsets: where each part begins, in bytes, by its number.
        num_bytes: of all of them.
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
        """The first pages in a block, one view [num_pages, *shape] per part.

        Args:
            buffer: uint8, as many bytes as `num_bytes` says.
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
        num_bytes: what stands in them takes.
        parts: what a page consists of.
        offsets: where each part begins among the bytes of `contents`.
        buffers: uint8 [bytes], one per block.
        filling: the copy from pages of the cache that was begun last; the engine's thread alone begins any.

    Args:
        parts: what a page consists of.
        num_pages: how many.
        pages_per_block: pages that a block has room for; None is all.
        new_buffer: memory for a block, uint8 [bytes], given their number; None takes it from the operating system.
    """

    def __init__(
        self,
        parts: Sequence[PagePart],
        num_pages: int,
        *,
        pages_per_block: int | None = None,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        whole = BlockLayout(parts, num_pages)
        layout = whole if pages_per_block is None else BlockLayout(parts, pages_per_block)
        self.num_pages = num_pages
        self.num_bytes = whole.num_bytes
        self.parts = whole.parts
        self.offsets = whole.offsets
        self.filling: Transfer = DONE
        self._order = whole.order
        self._layout = layout
        num_blocks = max(1, -(-num_pages // max(1, layout.num_pages)))
        if new_buffer is None:
            new_buffer = partial(torch.empty, dtype=torch.uint8)
        self.buffers: list[Tensor] = [new_buffer(layout.num_bytes) for _ in range(num_blocks)]

    @cached_property
    def blocks(self) -> list[list[Tensor]]:
        """Per block and part, [pages in the block, *shape]: views of the buffers.

        Who moves whole blocks needs none of them: of a large image they are thousands.
        """
        room = self._layout.num_pages
        return [
            self._layout.views(buffer, min(room, self.num_pages - number * room))
            for number, buffer in enumerate(self.buffers)
        ]

    def contents(self) -> Iterator[memoryview]:
        """All bytes in their order, piece by piece, to be read or written; waits until copies to here are done."""
        self.filling.wait()
        for number in self._order:
            for block in self.blocks:
                yield block[number].view(-1).view(torch.uint8).numpy().data

    def first(self, num_pages: int, new_image: Callable[[int], KVImage]) -> KVImage:
        """A copy of the first pages alone, in an image that is made for it; waits until copies to here are done."""
        self.filling.wait()
        image = new_image(num_pages)
        for source, target in zip(self.blocks, image.blocks, strict=False):
            for part, first_pages in zip(source, target, strict=True):
                first_pages.copy_(part[: len(first_pages)])
        return image
