"""Copies between the cache's pages on a GPU and pinned host memory, for which no step waits.

    pages ── gathered among the steps ──▶ staged on the GPU ── stream `leaving` ──▶ image
    image ── stream `coming` ──▶ staged on the GPU ── scattered on that stream, behind the steps handed over ──▶ pages

What is read may be overwritten by the next step, since the gathering comes before it, at the speed of the GPU's memory.
What is written is there when the copy says so. Only who reads more at once than is staged has the next step wait.

Pages lie in as many tensors as a model has layers, a session's pages anywhere in them. So whole blocks of an image
cross the bus, each in one copy, and the GPU itself puts their pages where they belong, a kernel per tensor for many
blocks. Elements are moved as integers that are as wide as their tensors allow.

Pinned memory takes hundreds of milliseconds per gigabyte to get, while the engine waits. Blocks of one size let torch's
own cache of it serve every image from what was reserved at the start, or was given back since: there are no holes to
fall into, however sessions of all sizes come and go, and memory that a stream still uses is not given out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from microturn.gpu.copy_stream import CopyStream, CudaCopyStream
from microturn.kv_copier import CopyShare, parts_of
from microturn.kv_image import BlockLayout, KVImage
from microturn.kv_transfer import DONE, Transfer
from microturn.upload import upload

# A block has room for so many pages, and at least so many bytes: small enough that the last one of an image wastes
# little, large enough for the bus, and a power of two, since torch's cache rounds to those.
_PAGES_PER_BLOCK = 8
_LEAST_BLOCK_BYTES = 1 << 20

# Staged on the GPU, each way: at most so much, and this share of the cache.
_STAGED_BYTES = 512 << 20
_STAGED_SHARE = 1 / 32

# Bytes that are handed over at once for turns that wait: 8,000 tokens of an 8B model with room to spare, and 40 ms at
# 50 GB/s. Of what can wait, half of what is staged: 5 ms, behind which a turn's copy may have to queue.
_BYTES_FOR_TURNS = 2 << 30

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class _Run:
    """Pages that are copied together.

    Attributes:
        pages: their ids.
        buffers: the blocks of the image that they lie in, from the first page of the first block on.
        slots: where these are staged.
    """

    pages: Sequence[int]
    buffers: Sequence[Tensor]
    slots: slice


class StreamCopier:
    """A `KVCopier` that copies on streams of its own.

    Args:
        tensors: all that pages consist of, [num_pages, ...] each.
        leaving: the stream of what is read.
        coming: the stream of what is written.
        pages_per_block: room of a block.
        num_staged: blocks that are staged each way.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        leaving: CopyStream,
        coming: CopyStream,
        *,
        pages_per_block: int,
        num_staged: int,
    ) -> None:
        self._leaving = leaving
        self._coming = coming
        self._device = tensors[0].device
        self._layout = layout = BlockLayout(parts_of(tensors), pages_per_block)
        self._bytes_per_page = layout.num_bytes // pages_per_block
        self._block_bytes = _power_of_two(layout.num_bytes)
        word_bytes = math.gcd(8, *(part.num_bytes for part in layout.parts))
        self._word = _WORDS[word_bytes]
        self._tensors = [tensor.flatten(1).view(self._word) for tensor in tensors]
        self._starts = [offset // word_bytes for offset in layout.offsets]
        staged = (num_staged, layout.num_bytes // word_bytes)
        self._staged_out = torch.empty(staged, dtype=self._word, device=self._device)
        self._staged_in = torch.empty(staged, dtype=self._word, device=self._device)
        # What is still being copied out of each of those that leave, and which is used next.
        self._in_use: list[Transfer] = [DONE] * num_staged
        self._next_slot = 0
        for_turns = max(1, _BYTES_FOR_TURNS // layout.num_bytes)
        self.share = CopyShare(
            for_turns * pages_per_block, max(1, num_staged // 2) * pages_per_block, unit=pages_per_block
        )

    @classmethod
    def on(cls, tensors: Sequence[Tensor]) -> Self:
        """One for pages on a GPU."""
        device = tensors[0].device
        bytes_per_page = sum(part.num_bytes for part in parts_of(tensors))
        block_bytes = max(_LEAST_BLOCK_BYTES, _power_of_two(_PAGES_PER_BLOCK * bytes_per_page))
        each_way_bytes = staged_bytes(sum(tensor.nbytes for tensor in tensors)) // 2
        return cls(
            tensors,
            CudaCopyStream(device),
            CudaCopyStream(device),
            pages_per_block=block_bytes // bytes_per_page,
            num_staged=max(1, each_way_bytes // block_bytes),
        )

    def new_image(self, num_pages: int) -> KVImage:
        pages_per_block = self._layout.num_pages
        return KVImage(self._layout.parts, num_pages, pages_per_block=pages_per_block, new_buffer=self._new_buffer)

    def image_bytes(self, num_pages: int) -> int:
        return -(-num_pages // self._layout.num_pages) * self._block_bytes

    def reserve(self, num_bytes: int) -> None:
        """Has torch keep so many bytes of pinned memory: what is given back stays in its cache."""
        buffers = [self._new_buffer(self._layout.num_bytes) for _ in range(num_bytes // self._block_bytes)]
        buffers.clear()

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        for run in self._runs(pages, image, first, self._next_slot):
            slots = range(run.slots.start, run.slots.stop)
            for slot in slots:
                self._in_use[slot].precede_steps()
            self._gather(run)
            self._leaving.follow_steps()
            self._leaving.enqueue(partial(_copy_blocks, self._staged_out[run.slots], run.buffers))
            image.filling = self._leaving.mark()
            for slot in slots:
                self._in_use[slot] = image.filling
            self._next_slot = run.slots.stop % len(self._in_use)

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        self._coming.follow(image.filling)
        for run in self._runs(pages, image, first, 0):
            self._coming.enqueue(partial(_copy_blocks, run.buffers, self._staged_in[run.slots]))
            self._coming.follow_steps()
            self._coming.enqueue(partial(self._scatter, run))
        return self._coming.mark()

    def _runs(self, pages: Sequence[int], image: KVImage, first: int, slot: int) -> Iterator[_Run]:
        """Cuts pages into as many at a time as can be staged, from a slot on."""
        room = self._layout.num_pages
        assert first % room == 0, "a copy begins in the middle of a block"
        first_block, num_blocks = first // room, -(-len(pages) // room)
        done = 0
        while done < num_blocks:
            end = min(num_blocks, done + len(self._in_use) - slot)
            buffers = image.buffers[first_block + done : first_block + end]
            words = [buffer.view(self._word) for buffer in buffers]
            yield _Run(pages[done * room : end * room], words, slice(slot, slot + len(words)))
            done, slot = end, 0

    def _gather(self, run: _Run) -> None:
        # Of the last block all is copied out: what lies behind the last page is any page.
        num_missing = -len(run.pages) % self._layout.num_pages
        ids = self._ids([*run.pages, *[run.pages[-1]] * num_missing])
        for tensor, staged in zip(self._tensors, self._parts_of(self._staged_out[run.slots]), strict=True):
            staged.copy_(tensor.index_select(0, ids).view_as(staged))

    def _scatter(self, run: _Run) -> None:
        ids = self._ids(run.pages)
        for tensor, staged in zip(self._tensors, self._parts_of(self._staged_in[run.slots]), strict=True):
            tensor.index_copy_(0, ids, staged.flatten(0, 1)[: len(ids)])

    def _parts_of(self, staged: Tensor) -> Iterator[Tensor]:
        """Of staged blocks each part, [blocks, pages in a block, words]."""
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            room, num_words = self._layout.num_pages, tensor.shape[1]
            yield staged[:, start : start + room * num_words].view(len(staged), room, num_words)

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return upload(torch.tensor(pages, dtype=torch.int64), self._device)

    def _new_buffer(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return buffer[:num_bytes]


def staged_bytes(num_bytes: int) -> int:
    """What is staged on the GPU, both ways, of a cache of so many bytes: a block each way at least."""
    return 2 * min(_STAGED_BYTES, int(_STAGED_SHARE * num_bytes))


def _copy_blocks(sources: Sequence[Tensor] | Tensor, targets: Sequence[Tensor] | Tensor) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _power_of_two(num_bytes: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (num_bytes - 1).bit_length()
