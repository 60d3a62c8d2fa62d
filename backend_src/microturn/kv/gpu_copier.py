"""Copies between KV pages on a GPU and pinned host memory, beside the steps.

    pages ── gathered on the stream of the steps ──▶ staging buffers ── `store_stream` ──▶ image
    image ── `load_stream` ──▶ staging buffers ── scattered on that stream, after the enqueued steps ──▶ pages

The next step may overwrite pages that are being stored, since they are gathered before it, at the speed of GPU memory.
Loaded pages are valid once the transfer is done. The next step waits only if one call stores more than the staging
buffers hold.

Each layer has its own memory, and a session's pages are scattered over it. So whole blocks of an image cross the bus,
each in one copy, and the GPU scatters their pages with one kernel per tensor for many blocks. Elements are moved as the
widest integers that all tensors allow.

Allocating pinned memory blocks the engine for hundreds of milliseconds per gigabyte. With blocks of one size torch's
caching host allocator serves every image from memory that was reserved at the start or freed since, without
fragmentation, and does not reuse memory that a stream still uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from microturn.kv.copier import CopyShare, parts_of
from microturn.kv.copy_stream import CopyStream, CudaCopyStream
from microturn.kv.image import BlockLayout, KVImage, PagePart
from microturn.kv.transfer import DONE, Transfer, upload

# Pages and minimum bytes of a block: small enough that the last block of an image wastes little, large enough for the
# bus, and a power of two, since torch's allocator rounds up to one.
_PAGES_PER_BLOCK = 8
_LEAST_BLOCK_BYTES = 1 << 20

# Staging buffers on the GPU, per direction: the maximum size, and their share of the cache.
_STAGED_BYTES = 512 << 20
_STAGED_SHARE = 1 / 32

# Bytes enqueued at once for waiting turns: 8,000 tokens of an 8B model with room to spare, and 40 ms at 50 GB/s. In the
# background half of the staging buffers: 5 ms, behind which a turn's copy may have to queue.
_BYTES_FOR_TURNS = 2 << 30

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class _Run:
    """Pages that are copied together.

    Attributes:
        pages: page ids.
        buffers: the image's blocks that hold them, from the first page of the first block on.
        slots: their staging slots.
    """

    pages: Sequence[int]
    buffers: Sequence[Tensor]
    slots: slice


class StreamCopier:
    """A `KVCopier` with its own CUDA streams.

    Args:
        tensors: all tensors of the pages, each [num_pages, ...].
        store_stream: copies from the GPU to host memory.
        load_stream: copies from host memory to the GPU.
        pages_per_block: pages in a block.
        num_staged: staging slots per direction, one block each.
    """

    loads_any_image = False  # they have to be pinned, and in blocks of its size

    def __init__(
        self,
        tensors: Sequence[Tensor],
        store_stream: CopyStream,
        load_stream: CopyStream,
        *,
        pages_per_block: int,
        num_staged: int,
    ) -> None:
        self._store_stream = store_stream
        self._load_stream = load_stream
        self._device = tensors[0].device
        self._layout = layout = BlockLayout(parts_of(tensors), pages_per_block)
        self.parts: Sequence[PagePart] = layout.parts
        self._bytes_per_page = layout.num_bytes // pages_per_block
        self._block_bytes = _power_of_two(layout.num_bytes)
        word_bytes = math.gcd(8, *(part.num_bytes for part in layout.parts))
        self._word = _WORDS[word_bytes]
        self._tensors = [tensor.flatten(1).view(self._word) for tensor in tensors]
        self._starts = [offset // word_bytes for offset in layout.offsets]
        staged = (num_staged, layout.num_bytes // word_bytes)
        self._staged_out = torch.empty(staged, dtype=self._word, device=self._device)
        self._staged_in = torch.empty(staged, dtype=self._word, device=self._device)
        # The store transfer that still reads each staging slot, and the slot to use next.
        self._in_use: list[Transfer] = [DONE] * num_staged
        self._next_slot = 0
        for_turns = max(1, _BYTES_FOR_TURNS // layout.num_bytes)
        self.share = CopyShare(
            for_turns * pages_per_block, max(1, num_staged // 2) * pages_per_block, unit=pages_per_block
        )

    @classmethod
    def on(cls, tensors: Sequence[Tensor]) -> Self:
        """A copier for pages on a GPU."""
        device = tensors[0].device
        bytes_per_page = sum(part.num_bytes for part in parts_of(tensors))
        block_bytes = max(_LEAST_BLOCK_BYTES, _power_of_two(_PAGES_PER_BLOCK * bytes_per_page))
        staged_bytes = staged_bytes_of(sum(tensor.nbytes for tensor in tensors))
        return cls(
            tensors,
            CudaCopyStream(device),
            CudaCopyStream(device),
            pages_per_block=block_bytes // bytes_per_page,
            num_staged=max(1, staged_bytes // block_bytes),
        )

    def new_image(self, num_pages: int) -> KVImage:
        pages_per_block = self._layout.num_pages
        return KVImage(self._layout.parts, num_pages, pages_per_block=pages_per_block, new_buffer=self._new_buffer)

    def image_bytes(self, num_pages: int) -> int:
        return -(-num_pages // self._layout.num_pages) * self._block_bytes

    def reserve(self, num_bytes: int) -> None:
        """Has torch cache `num_bytes` of pinned memory: freed blocks stay in its allocator."""
        buffers = [self._new_buffer(self._layout.num_bytes) for _ in range(num_bytes // self._block_bytes)]
        buffers.clear()

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        for run in self._runs(pages, image, first, self._next_slot):
            slots = range(run.slots.start, run.slots.stop)
            for slot in slots:
                self._in_use[slot].precede_steps()
            self._gather(run)
            self._store_stream.follow_steps()
            self._store_stream.enqueue(partial(_copy_blocks, self._staged_out[run.slots], run.buffers))
            image.store_transfer = self._store_stream.mark()
            for slot in slots:
                self._in_use[slot] = image.store_transfer
            self._next_slot = run.slots.stop % len(self._in_use)

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        self._load_stream.follow(image.store_transfer)
        for run in self._runs(pages, image, first, 0):
            self._load_stream.enqueue(partial(_copy_blocks, run.buffers, self._staged_in[run.slots]))
            self._load_stream.follow_steps()
            self._load_stream.enqueue(partial(self._scatter, run))
        return self._load_stream.mark()

    def _runs(self, pages: Sequence[int], image: KVImage, first: int, slot: int) -> Iterator[_Run]:
        """Splits pages into runs that fit the staging slots, from `slot` on."""
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
        # The last block is copied whole; behind its last page it holds arbitrary data.
        num_missing = -len(run.pages) % self._layout.num_pages
        ids = self._ids([*run.pages, *[run.pages[-1]] * num_missing])
        for tensor, staged in zip(self._tensors, self._parts_of(self._staged_out[run.slots]), strict=True):
            staged.copy_(tensor.index_select(0, ids).view_as(staged))

    def _scatter(self, run: _Run) -> None:
        ids = self._ids(run.pages)
        for tensor, staged in zip(self._tensors, self._parts_of(self._staged_in[run.slots]), strict=True):
            tensor.index_copy_(0, ids, staged.flatten(0, 1)[: len(ids)])

    def _parts_of(self, staged: Tensor) -> Iterator[Tensor]:
        """Each part of staged blocks, [blocks, pages in a block, words]."""
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            room, num_words = self._layout.num_pages, tensor.shape[1]
            yield staged[:, start : start + room * num_words].view(len(staged), room, num_words)

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return upload(torch.tensor(pages, dtype=torch.int64), self._device)

    def _new_buffer(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return buffer[:num_bytes]


def staged_bytes_of(cache_bytes: int) -> int:
    """Bytes of staging buffers on the GPU, per direction, for a cache of `cache_bytes`."""
    return min(_STAGED_BYTES, int(_STAGED_SHARE * cache_bytes))


def _copy_blocks(sources: Sequence[Tensor] | Tensor, targets: Sequence[Tensor] | Tensor) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _power_of_two(num_bytes: int) -> int:
    """The smallest power of two that is at least `num_bytes`."""
    return 1 << (num_bytes - 1).bit_length()
