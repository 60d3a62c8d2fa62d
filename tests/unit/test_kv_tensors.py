"""Tests of kv_tensors: pages out of the pool and back, bit by bit."""

from __future__ import annotations

import pytest
import torch

from microturn.kv_tensors import KVTensors, LayerShape
from support.tiers import bits_of, make_kv

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    """Whatever the bits mean: among them are numbers that are not one, of which there are many."""
    kv = make_kv(16, dtype=dtype)
    before = bits_of(kv, [5, 0, 9])
    image = kv.read([5, 0, 9])
    for tensor in kv._tensors:
        tensor.zero_()
    kv.write([2, 14, 7], image)
    assert bits_of(kv, [2, 14, 7]) == before
    assert not any(bits_of(kv, [5, 0, 9]))


def test_an_image_holds_the_pages_that_were_read_and_no_more() -> None:
    kv = make_kv(16)
    assert kv.read([3, 4]).num_bytes == 2 * kv.bytes_per_page
    assert kv.bytes_per_page == 4 * KVTensors.bytes_per_token([LayerShape(2, 3), LayerShape(1, 5)])


def test_pages_may_be_copied_a_few_at_a_time() -> None:
    kv = make_kv(16)
    pages = [8, 1, 6, 3, 12]
    image = kv.new_image(5)
    kv.read(pages[:2], image)
    kv.read(pages[2:], image, first=2)
    assert torch.equal(image.buffer, kv.read(pages).buffer)
    before = bits_of(kv, pages)
    kv.write([0, 2, 4], image, first=0)
    kv.write([5, 7], image, first=3)
    assert bits_of(kv, [0, 2, 4, 5, 7]) == before


def test_an_image_does_not_change_with_the_pages() -> None:
    kv = make_kv(4)
    image = kv.read([1])
    before = image.buffer.clone()
    kv.layers[0].zero_()
    assert torch.equal(image.buffer, before)
