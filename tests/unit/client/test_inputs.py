import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from microturn_client import InvalidArgument
from microturn_client._inputs import encode_input


@given(st.text())
def test_text_travels_as_utf8_with_its_length(text):
    tensor = encode_input(text)
    data = text.encode()
    assert (tensor.name, tensor.datatype, tensor.shape) == ("text_input", "BYTES", (1, 1))
    assert tensor.data == struct.pack("<I", len(data)) + data
    assert tensor.is_empty == (text == "")


def test_bytes_travel_as_they_are():
    assert encode_input(b"\xff\xfe").data == b"\x02\0\0\0\xff\xfe"


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([list, tuple, np.array]))
def test_ids_travel_as_int32(ids, kind):
    tensor = encode_input(kind(ids) if ids else kind(ids, dtype=int) if kind is np.array else kind(ids))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("input_ids", "INT32", (1, len(ids)))
    assert tensor.data == struct.pack(f"<{len(ids)}i", *ids)
    assert tensor.is_empty == (not ids)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4"])
def test_integer_arrays_of_any_width(kind):
    assert encode_input(np.array([1, 2], kind)).data == struct.pack("<2i", 1, 2)


def test_ranges_are_sequences_of_ids():
    assert encode_input(range(3)).data == struct.pack("<3i", 0, 1, 2)


def test_nothing_is_an_input_of_no_tokens():
    tensor = encode_input(None)
    assert (tensor.name, tensor.shape, tensor.data, tensor.is_empty) == ("input_ids", (1, 0), b"", True)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_embeddings_travel_as_float32(kind):
    tensor = encode_input(np.array([[0.5, 1.0, -2.0], [3.0, 0.0, 1.5]], kind))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("input_embeds", "FP32", (1, 2, 3))
    assert tensor.data == struct.pack("<6f", 0.5, 1.0, -2.0, 3.0, 0.0, 1.5)


def test_a_transposed_view_keeps_its_order():
    embeds = np.arange(6, dtype=np.float32).reshape(3, 2).T
    assert encode_input(embeds).data == struct.pack("<6f", 0, 2, 4, 1, 3, 5)


class Elsewhere:
    """An array of a library that nobody has heard of, which has DLPack."""

    def __init__(self, values, error=None):
        self._values, self._error = values, error

    def __dlpack__(self, *, stream=None):
        if self._error is not None:
            raise self._error
        return self._values.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_embeddings_of_any_library_with_dlpack(kind):
    embeds = np.array([[0.5, 1.0, -2.0], [3.0, 0.0, 1.5]], kind)
    assert encode_input(Elsewhere(embeds)) == encode_input(embeds)


def test_ids_of_any_library_with_dlpack():
    assert encode_input(Elsewhere(np.array([1, 2]))) == encode_input([1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_embeddings_of_torch_of_any_type_of_floats(dtype):
    values = [[0.5, 1.0, -2.0], [3.0, 0.0, 1.5]]
    tensor = torch.tensor(values, dtype=dtype)
    assert encode_input(tensor) == encode_input(np.array(values))
    assert encode_input(tensor.requires_grad_()) == encode_input(np.array(values))
    assert encode_input(tensor.T.contiguous().T) == encode_input(np.array(values))
    assert encode_input(tensor[:, ::2]) == encode_input(np.array(values)[:, ::2])


def test_ids_of_torch():
    assert encode_input(torch.tensor([1, 2])) == encode_input([1, 2])
    assert encode_input(torch.tensor([], dtype=torch.int32)) == encode_input(None)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 3, device="meta"),
        torch.zeros(3),
        torch.zeros(1, 2, 3),
        torch.tensor([2**31]),
        Elsewhere(np.zeros((1, 2)), BufferError("it lies on a device of its own")),
        Elsewhere(np.zeros((1, 2)), RuntimeError("a type that numpy does not have")),
    ],
)
def test_a_tensor_that_cannot_be_an_input_is_refused(value):
    with pytest.raises(InvalidArgument):
        encode_input(value)


@pytest.mark.parametrize("value", [torch.tensor([True]), torch.zeros(1, 2, dtype=torch.complex64), Elsewhere])
def test_a_tensor_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match="not"):
        encode_input(value)


@pytest.mark.parametrize(
    "value", [3, 1.5, object(), {1: 2}, {1, 2}, [1.5], ["a"], [True], [[1, 2]], [None], np.array(["a"])]
)
def test_another_type_is_refused(value):
    with pytest.raises(TypeError, match="not"):
        encode_input(value)


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.zeros((1, 2, 3)), np.zeros((1, 2), int), [2**70], [2**31], [-(2**31) - 1], "\ud800"]
)
def test_another_shape_or_range_is_refused(value):
    with pytest.raises(InvalidArgument):
        encode_input(value)
