"""Copies pages between the KV cache and host memory, and limits how many are copied per step.

`InPlaceCopier` is for a CPU and copies synchronously: steps and copies share the same memory and cores, so that
overlapping them would gain nothing. `gpu_copier.StreamCopier` copies beside the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from microturn.kv.image import KVImage, PagePart
from microturn.kv.transfer import DONE, Transfer

# Bytes copied between two steps, for waiting turns and in the background. At 2 GB/s or more, which two busy cores
# reach, they take at most 16 and 8 ms, during which running turns wait.
_BYTES_FOR_TURNS = 32 << 20
_BYTES_FOR_LATER = 16 << 20


@dataclass(frozen=True)
class CopyShare:
    """How many pages may be copied between two steps.

    Attributes:
        for_turns: for waiting turns.
        for_later: in the background.
        unit: a copy begins at a multiple of this many pages and costs as if it ended at one; both shares are multiples.
    """

    for_turns: int
    for_later: int
    unit: int = 1

    @classmethod
    def of(cls, bytes_per_page: int) -> Self:
        """What copies that hold up the steps may take."""
        return cls(*(max(1, num_bytes // bytes_per_page) for num_bytes in (_BYTES_FOR_TURNS, _BYTES_FOR_LATER)))


class CopyBudget:
    """The remaining pages of a share.

    Attributes:
        num_left: pages left.

    Args:
        num_pages: the share.
        unit: see `CopyShare`.
    """

    def __init__(self, num_pages: int, unit: int) -> None:
        self.num_left = num_pages
        self._unit = unit

    def take(self, num_pages: int) -> int:
        """Takes up to `num_pages` pages from the budget and returns how many it took."""
        taken = min(num_pages, self.num_left)
        self.num_left -= -(-taken // self._unit) * self._unit
        return taken


class KVCopier(Protocol):
    """Copies whole pages unchanged. Only the engine thread may call it, except for `new_image` and `image_bytes`.

    Attributes:
        parts: what a page consists of in an image.
        share: how many pages may be copied between two steps.
        loads_any_image: whether `write` takes images that `new_image` has not made.
    """

    parts: Sequence[PagePart]
    share: CopyShare
    loads_any_image: bool

    def new_image(self, num_pages: int) -> KVImage:
        """Allocates an uninitialised image of `num_pages` pages in host memory."""
        ...

    def image_bytes(self, num_pages: int) -> int:
        """Bytes of host memory that an image of `num_pages` pages takes."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Allocates host memory for future images, where allocation is slow."""
        ...

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        """Copies pages to an image. They may be released at once; the image is complete when `store_transfer` is done.

        Args:
            pages: page ids.
            image: the target, from `new_image`.
            first: index of the first page in the image.
        """
        ...

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        """Copies pages of an image, from index `first` on, into these pages of the cache.

        Do not read the pages before the transfer is done; before releasing them sooner, call `precede_steps`.
        """
        ...


class InPlaceCopier:
    """A `KVCopier` for pages in host memory.

    Args:
        tensors: all tensors of the pages, each [num_pages, ...].
    """

    loads_any_image = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._set_parts(parts_of(tensors))

    def _set_parts(self, parts: Sequence[PagePart]) -> None:
        """Says what a page consists of in an image."""
        self.parts = parts
        self._bytes_per_page = sum(part.num_bytes for part in parts)
        self.share = CopyShare.of(self._bytes_per_page)

    def new_image(self, num_pages: int) -> KVImage:
        return KVImage(self.parts, num_pages)

    def image_bytes(self, num_pages: int) -> int:
        return num_pages * self._bytes_per_page

    def reserve(self, num_bytes: int) -> None:
        pass  # the operating system allocates on demand

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        ids = torch.tensor(pages, dtype=torch.int64)
        for tensor, part in zip(self._tensors, image.blocks[0], strict=True):
            torch.index_select(tensor, 0, ids, out=part[first : first + len(pages)])

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        ids = torch.tensor(pages, dtype=torch.int64)
        for tensor, part in zip(self._tensors, image.blocks[0], strict=True):
            tensor.index_copy_(0, ids, part[first : first + len(pages)])
        return DONE


def parts_of(tensors: Sequence[Tensor]) -> list[PagePart]:
    """The parts of a page, one per tensor."""
    return [PagePart(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
