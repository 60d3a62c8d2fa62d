"""Tests of kv_image."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.image import KVImage, PagePart

PARTS = [PagePart((2, 4, 3), torch.float32), PagePart((5,), torch.int8)]


def numbered(num_pages: int, pages_per_block: int | None = None) -> KVImage:
    """An image in which each page's first part says its number, and the other its opposite."""
    image = KVImage(PARTS, num_pages, pages_per_block=pages_per_block)
    numbers = iter(range(num_pages))
    for wide, narrow in image.blocks:
        for page in range(len(wide)):
            number = next(numbers)
            wide[page], narrow[page] = number, -number
    return image


def test_an_image_takes_as_many_bytes_as_its_pages() -> None:
    image = KVImage(PARTS, 7)
    assert image.num_bytes == 7 * (24 * 4 + 5) == image.buffers[0].nbytes
    assert [[part.shape for part in block] for block in image.blocks] == [[(7, 2, 4, 3), (7, 5)]]


def test_parts_of_any_types_lie_behind_each_other_and_are_aligned() -> None:
    """Elements that are not aligned cannot be read as numbers; gaps are not allowed in a safetensors file."""
    parts = [PagePart((3,), torch.int8), PagePart((1,), torch.float32), PagePart((1,), torch.bfloat16)]
    image = KVImage(parts, 3)
    (tensors,), (buffer,) = image.blocks, image.buffers
    for tensor, offset in zip(tensors, image.offsets, strict=True):
        assert offset % tensor.element_size() == 0
        assert tensor.data_ptr() == buffer.data_ptr() + offset
    ends = sorted((offset, offset + tensor.nbytes) for tensor, offset in zip(tensors, image.offsets, strict=True))
    assert [start for start, _ in ends] == [0, *[end for _, end in ends[:-1]]]
    assert ends[-1][1] == image.num_bytes


def test_there_may_be_no_pages() -> None:
    assert KVImage([PagePart((2,), torch.float32)], 0).num_bytes == 0


@pytest.mark.parametrize("pages_per_block", [1, 3, 4, 7, 8, 100])
def test_what_stands_in_an_image_is_the_same_however_it_is_cut_into_blocks(pages_per_block: int) -> None:
    whole, cut = numbered(8), numbered(8, pages_per_block)
    assert len(cut.blocks) == -(-8 // pages_per_block)
    assert b"".join(cut.contents()) == b"".join(whole.contents())
    assert (cut.num_bytes, cut.offsets) == (whole.num_bytes, whole.offsets)


@pytest.mark.parametrize("pages_per_block", [None, 1, 3, 8])
@pytest.mark.parametrize("num_pages", [1, 3, 5, 8])
def test_the_first_pages_are_copied(num_pages: int, pages_per_block: int | None) -> None:
    image = numbered(8, pages_per_block)
    first = image.first(num_pages, lambda num_pages: KVImage(PARTS, num_pages, pages_per_block=pages_per_block))
    assert b"".join(first.contents()) == b"".join(numbered(num_pages).contents())


def test_who_looks_at_an_image_waits_until_it_is_filled() -> None:
    class Filling:
        is_waited_for = False

        def is_done(self) -> bool:
            return self.is_waited_for

        def wait(self) -> None:
            self.is_waited_for = True

        def precede_steps(self) -> None:
            raise AssertionError("no step looks at it")

    images = numbered(2), numbered(2)
    for image in images:
        image.store_transfer = Filling()
    next(images[0].contents())
    images[1].first(1, lambda num_pages: KVImage(PARTS, num_pages))
    assert all(image.store_transfer.is_done() for image in images)
