"""Copies of pages between the cache and host memory: who makes them, and how many a step has time for.

This one copies while the caller waits: on a CPU, where steps and copies want the same memory and the same cores, there
is nothing to be won otherwise. A GPU's copies itself, beside the steps (`gpu.kv_copier`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from microturn.kv_image import KVImage, PagePart
from microturn.kv_transfer import DONE, Transfer

# Bytes copied between two steps, for turns that wait, and for what can wait. At 2 GB/s or more, which two busy cores
# reach, these are at most 16 and 8 ms, for which running turns wait.
_BYTES_FOR_TURNS = 32 << 20
_BYTES_FOR_LATER = 16 << 20


@dataclass(frozen=True)
class CopyShare:
    """How many pages may be copied between two steps.

    Attributes:
        for_turns: for turns that wait.
        for_later: of what can wait.
        unit: a copy is begun at a multiple of so many pages, and costs as if it ended at one; so do the shares.
    """

    for_turns: int
    for_later: int
    unit: int = 1


class CopyBudget:
    """What is left of a share.

    Attributes:
        num_left: pages.

    Args:
        num_pages: the share.
        unit: see `CopyShare`.
    """

    def __init__(self, num_pages: int, unit: int) -> None:
        self.num_left = num_pages
        self._unit = unit

    def take(self, num_pages: int) -> int:
        """Takes so many pages out of it, or as many as are left."""
        taken = min(num_pages, self.num_left)
        self.num_left -= -(-taken // self._unit) * self._unit
        return taken


class KVCopier(Protocol):
    """Copies whole pages, bit by bit. Belongs to the engine's thread, but for `new_image` and `image_bytes`.

    Attributes:
        share: how many pages may be copied between two steps.
    """

    share: CopyShare

    def new_image(self, num_pages: int) -> KVImage:
        """Host memory for so many pages; nothing stands in it yet."""
        ...

    def image_bytes(self, num_pages: int) -> int:
        """What an image of so many pages takes in host memory."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Gets host memory for images that are to come, where it takes long to get."""
        ...

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        """Copies pages out. They may be given up at once; what the image holds is complete when its `filling` is done.

        Args:
            pages: their ids.
            image: where to, one of `new_image`.
            first: index in the image of the first page.
        """
        ...

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        """Copies pages of an image, from its index `first` on, into these.

        Nobody may use what stands in them before the copy is done; who gives them up sooner has it precede the steps.
        """
        ...


class InPlaceCopier:
    """A `KVCopier` for pages in host memory.

    Args:
        tensors: all that pages consist of, [num_pages, ...] each.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._parts = parts_of(tensors)
        self._bytes_per_page = sum(part.num_bytes for part in self._parts)
        self.share = CopyShare(self._num_pages_in(_BYTES_FOR_TURNS), self._num_pages_in(_BYTES_FOR_LATER))

    def new_image(self, num_pages: int) -> KVImage:
        return KVImage(self._parts, num_pages)

    def image_bytes(self, num_pages: int) -> int:
        return num_pages * self._bytes_per_page

    def reserve(self, num_bytes: int) -> None:
        pass  # the operating system gives it when it is asked

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        ids = torch.tensor(pages, dtype=torch.int64)
        for tensor, part in zip(self._tensors, image.blocks[0], strict=True):
            torch.index_select(tensor, 0, ids, out=part[first : first + len(pages)])

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        ids = torch.tensor(pages, dtype=torch.int64)
        for tensor, part in zip(self._tensors, image.blocks[0], strict=True):
            tensor.index_copy_(0, ids, part[first : first + len(pages)])
        return DONE

    def _num_pages_in(self, num_bytes: int) -> int:
        return max(1, num_bytes // self._bytes_per_page)


def parts_of(tensors: Sequence[Tensor]) -> list[PagePart]:
    """What a page consists of, given all that pages consist of."""
    return [PagePart(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
