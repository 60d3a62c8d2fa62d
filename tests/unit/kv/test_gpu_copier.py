"""Tests of gpu.kv_copier over tensors of a CPU, on streams that do their work late (`support.late_copies`)."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.tensors import KVTensors
from support.late_copies import LateCopier
from support.tiers import bits_of, contents_of, make_kv

# Blocks have three pages, and two of them are staged.
NUM_PAGES = 40
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64]


def late_kv(dtype: torch.dtype = torch.float32) -> KVTensors:
    return make_kv(NUM_PAGES, dtype=dtype, new_copier=LateCopier)


def spoil(kv: KVTensors, pages: list[int]) -> None:
    """The next step writes these pages."""
    for tensor in kv.tensors:
        tensor[pages] = 7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_pages", [1, 2, 3, 4, 6, 7, 19])
def test_pages_come_back_bit_by_bit(dtype: torch.dtype, num_pages: int) -> None:
    kv = late_kv(dtype)
    pages, others = list(range(num_pages))[::-1], list(range(NUM_PAGES - num_pages, NUM_PAGES))
    before, rest = bits_of(kv, pages), bits_of(kv, [num_pages])
    image = kv.read(pages)
    spoil(kv, pages)
    kv.write(others, image).wait()
    assert bits_of(kv, others) == before
    assert bits_of(kv, [num_pages]) == rest


def test_the_files_bytes_are_those_that_a_cpus_image_has() -> None:
    pages = [8, 1, 6, 3, 12, 30, 31]
    assert contents_of(late_kv().read(pages)) == contents_of(make_kv(NUM_PAGES).read(pages))


def test_nothing_is_there_before_the_copy_says_so() -> None:
    kv = late_kv()
    before = bits_of(kv, [4, 5])
    image = kv.read([4, 5])
    transfer = kv.write([6, 7], image)
    assert bits_of(kv, [6, 7]) != before
    assert not transfer.is_done()
    for _ in range(100):
        if transfer.is_done():
            break
    assert bits_of(kv, [6, 7]) == before


def test_many_copies_may_be_under_way_at_once() -> None:
    """More than are staged: their blocks follow each other through it."""
    kv = late_kv()
    rows = [list(range(first, first + 7)) for first in range(0, 28, 7)]
    before = [bits_of(kv, pages) for pages in rows]
    images = [kv.read(pages) for pages in rows]
    for pages in rows:
        spoil(kv, pages)
    transfers = [kv.write(pages, image) for pages, image in zip(reversed(rows), images, strict=True)]
    for transfer in transfers:
        transfer.wait()
    assert [bits_of(kv, pages) for pages in reversed(rows)] == before


def test_pages_may_be_copied_a_few_blocks_at_a_time() -> None:
    kv = late_kv()
    pages = [8, 1, 6, 3, 12, 30, 31]
    before = bits_of(kv, pages[:5])
    image = kv.new_image(7)
    kv.read(pages[:3], image)
    kv.read(pages[3:], image, first=3)
    spoil(kv, pages)
    transfers = [kv.write([0, 2, 4], image), kv.write([5, 7], image, first=3)]
    for transfer in transfers:
        transfer.wait()
    assert bits_of(kv, [0, 2, 4, 5, 7]) == before


def test_a_copy_does_not_begin_in_the_middle_of_a_block() -> None:
    kv = late_kv()
    with pytest.raises(AssertionError, match="middle of a block"):
        kv.read([1, 2], kv.new_image(7), first=2)


def test_whoever_has_given_up_pages_may_have_the_next_step_come_after_the_copy() -> None:
    kv = late_kv()
    transfer = kv.write([6, 7], kv.read([4, 5]))
    transfer.precede_steps()
    spoil(kv, [6, 7])
    after = bits_of(kv, [6, 7])
    transfer.wait()
    assert bits_of(kv, [6, 7]) == after


def test_memory_is_counted_in_whole_blocks() -> None:
    """A page takes 352 bytes, a block the next power of two for three of them."""
    kv = late_kv()
    assert kv.bytes_per_page == 352
    for num_pages, num_blocks in ((0, 0), (1, 1), (3, 1), (4, 2), (7, 3)):
        assert kv.image_bytes(num_pages) == num_blocks * 2048
    assert sum(buffer.untyped_storage().nbytes() for buffer in kv.new_image(7).buffers) == kv.image_bytes(7)
