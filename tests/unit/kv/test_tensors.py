"""Tests of kv_tensors: what a page keeps, and pages out of the pool and back, bit by bit."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from support.tiers import bits_of, contents_of, make_kv

LAYERS = [LayerShape(3, 64), LayerShape(1, 21, window=20)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64]


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        (torch.float32, 2 * 4 * (3 * 64 + 21)),
        (torch.bfloat16, 2 * 2 * (3 * 64 + 21)),
        (torch.int8, 2 * (3 * (64 + 4) + (21 + 4))),
    ],
    ids=str,
)
def test_a_token_takes_as_many_bytes_as_are_said(dtype: torch.dtype, token_bytes: int) -> None:
    kv = KVTensors(LAYERS, 5, 8, dtype)
    assert KVTensors.bytes_per_token(LAYERS, dtype) == token_bytes
    assert sum(tensor.nbytes for layer in kv.layers for tensor in layer.tensors) == 5 * 8 * token_bytes


@pytest.mark.parametrize(("dtype", "num_tensors"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.int8, 2)], ids=str)
def test_all_tensors_of_a_layer_are_laid_out_alike(dtype: torch.dtype, num_tensors: int) -> None:
    layer = KVTensors(LAYERS, 5, 8, dtype).layers[0]
    assert layer.elements.shape == (5, 2, 3, 8, 64)
    assert layer.elements.dtype == dtype
    assert [tensor.shape[:4] for tensor in layer.tensors] == [(5, 2, 3, 8)] * num_tensors


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_page_lies_in_memory_in_one_piece(dtype: torch.dtype, layout: PageLayout) -> None:
    """Its scales, if it has any, behind its elements; and the next page behind these."""
    layer = KVTensors([LayerShape(3, 20)], 5, 16, dtype, layout=layout).layers[0]
    lengths = [tensor[0].nbytes for tensor in layer.tensors]
    starts = [tensor.data_ptr() for tensor in layer.tensors]
    assert [start - starts[0] for start in starts] == [sum(lengths[:number]) for number in range(len(lengths))]
    assert {tensor[1].data_ptr() - tensor[0].data_ptr() for tensor in layer.tensors} == {sum(lengths)}
    assert [len(array) for array in layer.arrays if len(array)] == [
        (4 * sum(lengths) + length) // tensor.itemsize for length, tensor in zip(lengths, layer.tensors, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.int8, 0.5001 / 127)], ids=str
)
def test_what_is_encoded_into_a_page_is_decoded_from_it(dtype: torch.dtype, tolerance: float) -> None:
    """The tolerance is relative to the largest element of a vector."""
    layer = KVTensors(LAYERS, 5, 8, dtype).layers[0]
    x = torch.randn(16, 3, 64, generator=torch.Generator().manual_seed(4))
    elements, scales = layer.encode(x)
    layer.elements[4] = elements.view(2, 8, 3, 64).transpose(1, 2)
    layer.scales[4] = scales.view(2, 8, -1).transpose(1, 2)
    back = layer.decode(torch.tensor([4]))
    assert back.dtype == torch.float32
    assert back.shape == (1, 2, 3, 8, 64)
    off = (back.transpose(2, 3).reshape(x.shape) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert off.max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_page_that_is_copied_in_all_tensors_is_the_same_page(dtype: torch.dtype) -> None:
    layer = KVTensors(LAYERS, 5, 8, dtype).layers[1]
    x = torch.randn(2 * 2 * 8, 1, 21, generator=torch.Generator().manual_seed(4))
    elements, scales = layer.encode(x)
    layer.elements[:2], layer.scales[:2] = elements.view(2, 2, 1, 8, 21), scales.view(2, 2, -1, 8)
    for tensor in layer.tensors:
        tensor[3] = tensor[1]
    one, copy, other = layer.decode(torch.tensor([1, 3, 0]))
    assert torch.equal(one, copy)
    assert not torch.equal(one, other)


def test_keys_and_values_in_float8_have_a_scale_for_each_layer() -> None:
    """Also where layers share pages: keys of thousands and values of a hundred thousandth keep three bits."""
    layers = [LayerShape(3, 64), LayerShape(3, 64, 40)]
    scales = [LayerScales(64.0, 2**-20), LayerScales(32.0, 2**-21)]
    kv = KVTensors(layers, 5, 8, torch.float8_e4m3fn, groups=LayerGroups.of(layers), float8=scales)
    assert kv.layers[0].elements is kv.layers[1].elements
    keys, values = (torch.randn(8, 3, 64, generator=torch.Generator().manual_seed(4)) * size for size in (3e3, 3e-5))
    for number, layer in enumerate(kv.layers):
        layer.put(torch.full((8,), number), torch.arange(8), keys, values)
    for number, layer in enumerate(kv.layers):
        (decoded,) = layer.decode(torch.tensor([number]))
        for got, given, scale in zip(decoded, (keys, values), scales[number], strict=True):
            assert ((got.transpose(0, 1) - given).abs() <= given.abs() / 16 + scale * 2**-10).all()


# ---- pages out of the pool and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    """Whatever the bits mean: among them are numbers that are not one, of which there are many."""
    kv = make_kv(16, dtype=dtype)
    before = bits_of(kv, [5, 0, 9])
    image = kv.read([5, 0, 9])
    for tensor in kv.tensors:
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
    assert contents_of(image) == contents_of(kv.read(pages))
    before = bits_of(kv, pages)
    kv.write([0, 2, 4], image, first=0)
    kv.write([5, 7], image, first=3)
    assert bits_of(kv, [0, 2, 4, 5, 7]) == before


def test_an_image_does_not_change_with_the_pages() -> None:
    kv = make_kv(4)
    image = kv.read([1])
    before = contents_of(image)
    kv.layers[0].elements.zero_()
    assert contents_of(image) == before
