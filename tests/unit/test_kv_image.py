"""Tests of kv_image."""

from __future__ import annotations

import torch

from microturn.kv_image import KVImage, PagePart


def test_an_image_takes_as_many_bytes_as_its_pages() -> None:
    parts = [PagePart((2, 4, 3), torch.float32), PagePart((5,), torch.int8)]
    image = KVImage(parts, 7)
    assert image.num_bytes == 7 * (24 * 4 + 5) == image.buffer.nbytes
    assert [tensor.shape for tensor in image.tensors] == [(7, 2, 4, 3), (7, 5)]


def test_parts_of_any_types_lie_behind_each_other_and_are_aligned() -> None:
    """Elements that are not aligned cannot be read as numbers; gaps are not allowed in a safetensors file."""
    parts = [PagePart((3,), torch.int8), PagePart((1,), torch.float32), PagePart((1,), torch.bfloat16)]
    image = KVImage(parts, 3)
    for tensor, offset in zip(image.tensors, image.offsets, strict=True):
        assert offset % tensor.element_size() == 0
        assert tensor.data_ptr() == image.buffer.data_ptr() + offset
    ends = sorted((offset, offset + tensor.nbytes) for tensor, offset in zip(image.tensors, image.offsets, strict=True))
    assert [start for start, _ in ends] == [0, *[end for _, end in ends[:-1]]]
    assert ends[-1][1] == image.num_bytes


def test_a_part_is_a_view() -> None:
    image = KVImage([PagePart((2,), torch.float32)], 5)
    image.buffer.zero_()
    image.part(1, 3)[0].fill_(1.0)
    assert image.tensors[0].sum() == 4
    assert image.tensors[0][[0, 3, 4]].sum() == 0


def test_there_may_be_no_pages() -> None:
    assert KVImage([PagePart((2,), torch.float32)], 0).num_bytes == 0
