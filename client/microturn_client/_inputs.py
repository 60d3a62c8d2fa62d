"""Turns what a user hands to a turn into the one input tensor of the wire. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from microturn_client._errors import InvalidArgument

TurnInput = str | bytes | Sequence[int] | NDArray[Any] | None

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class InputTensor:
    """One named tensor.

    Attributes:
        data: in the wire's little-endian raw form.
        is_empty: it appends nothing: the turn keeps alive, closes, or goes on generating.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    is_empty: bool


def encode_input(value: TurnInput) -> InputTensor:
    """Chooses the tensor by the type of ``value``.

    Args:
        value: text, or its UTF-8 bytes; token ids as a sequence or an integer array ``[n]``; embeddings as a floating
            array ``[n, hidden]``; None for an input of zero tokens.

    Raises:
        InvalidArgument: for an array of another shape, an id beyond 32 bits, or text that is not valid Unicode.
        TypeError: for any other type.
    """
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"text must be valid Unicode: {error}") from error
    if isinstance(value, bytes):
        data = len(value).to_bytes(4, "little") + value
        return InputTensor("text_input", "BYTES", (1, 1), data, is_empty=not value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return _encode_embeds(value)
    return _encode_ids(() if value is None else value)


def _encode_embeds(embeds: NDArray[Any]) -> InputTensor:
    if embeds.ndim != 2:
        raise InvalidArgument(f"embeddings are an array [n, hidden], not one of shape {list(embeds.shape)}")
    return InputTensor(
        "input_embeds", "FP32", (1, *embeds.shape), embeds.astype("<f4").tobytes(), is_empty=len(embeds) == 0
    )


def _encode_ids(ids: Sequence[int] | NDArray[Any]) -> InputTensor:
    if not isinstance(ids, Sequence | np.ndarray):
        raise TypeError(f"a turn takes text, token ids, embeddings or None, not {type(ids).__name__}")
    array = np.asarray(ids) if len(ids) else np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers below 2**31, not {array.dtype} values")
    if array.ndim != 1:
        raise InvalidArgument(f"token ids are one sequence of integers, not an array of shape {list(array.shape)}")
    if array.size and not (_INT32.min <= array.min() and array.max() <= _INT32.max):
        raise InvalidArgument("token ids are integers below 2**31")
    return InputTensor("input_ids", "INT32", (1, array.size), array.astype("<i4").tobytes(), is_empty=array.size == 0)
