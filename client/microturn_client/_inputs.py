"""Turns what a user hands to a turn into the one input tensor of the wire. Knows nothing of requests.

Imports neither numpy nor torch: who hands over an array has imported numpy, and who hands over a tensor its library.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from microturn_client._errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The length that stands before a text.
TEXT_HEADER_BYTES = 4

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class SupportsDLPack(Protocol):
    """An array of any library that has the DLPack protocol: numpy, torch, JAX, CuPy and others."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


TurnInput = str | bytes | Sequence[int] | SupportsDLPack | None


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
            array ``[n, hidden]``; None for an input of zero tokens. An array is one of numpy, or of any library that
            has DLPack; one of torch may be on any device and of any type of floats.

    Raises:
        InvalidArgument: for an array of another shape, or one that cannot be read; for an id beyond 32 bits; for text
            that is not valid Unicode.
        TypeError: for any other type.
    """
    if isinstance(value, str | bytes):
        return _encode_text(value)
    if value is None:
        return _encode_ids(())
    if is_array(value):
        return _encode_array(host_array(value))
    if isinstance(value, Sequence):
        return _encode_ids(value)
    raise TypeError(f"a turn takes text, token ids, embeddings or None, not {type(value).__name__}")


def is_array(value: object) -> TypeGuard[SupportsDLPack]:
    """Whether it is an array or a tensor of some library."""
    return hasattr(type(value), "__dlpack__")


def host_array(tensor: SupportsDLPack) -> NDArray[Any]:
    """A tensor of any library as a numpy array; one of floats that numpy does not have becomes float32.

    Raises:
        InvalidArgument: the library does not hand it out to the host.
    """
    import numpy as np

    if isinstance(tensor, np.ndarray):
        return tensor
    torch = sys.modules.get("torch")
    try:
        if torch is None or not isinstance(tensor, torch.Tensor):
            return np.from_dlpack(tensor)
        # DLPack hands out no tensor that has a gradient, and none of another device; numpy has no bfloat16.
        on_host: Any = tensor.detach().cpu()
        return np.asarray(on_host.float() if on_host.is_floating_point() else on_host)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise InvalidArgument(
            f"a {kind} that cannot be read ({error}): hand over one in host memory, of float32"
        ) from error


def _encode_text(text: str | bytes) -> InputTensor:
    try:
        utf8 = text if isinstance(text, bytes) else text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text must be valid Unicode: {error}") from error
    return InputTensor("text_input", "BYTES", (1, 1), _with_length(utf8), is_empty=not utf8)


def _with_length(utf8: bytes) -> bytes:
    return len(utf8).to_bytes(TEXT_HEADER_BYTES, "little") + utf8


def _encode_array(value: NDArray[Any]) -> InputTensor:
    if value.dtype.kind == "f":
        if value.ndim != 2:
            raise InvalidArgument(f"embeddings are an array [n, hidden], not one of shape {list(value.shape)}")
        data = value.astype("<f4").tobytes()
        return InputTensor("input_embeds", "FP32", (1, *value.shape), data, is_empty=len(value) == 0)
    if value.dtype.kind not in "iu" and value.size:
        raise TypeError(f"token ids are integers below 2**31, not {value.dtype} values")
    if value.ndim != 1:
        raise InvalidArgument(f"token ids are one sequence of integers, not an array of shape {list(value.shape)}")
    if value.size and not (value.min() >= _INT32_MIN and value.max() <= _INT32_MAX):
        raise InvalidArgument("token ids are integers below 2**31")
    return InputTensor("input_ids", "INT32", (1, value.size), value.astype("<i4").tobytes(), is_empty=value.size == 0)


def _encode_ids(ids: Sequence[Any]) -> InputTensor:
    if bool in map(type, ids):
        raise TypeError("token ids are integers below 2**31, not truth values")
    try:
        data = array("i", ids).tobytes()
    except OverflowError as error:
        raise InvalidArgument("token ids are integers below 2**31") from error
    except TypeError as error:
        raise TypeError(f"token ids are integers below 2**31, not what this has: {error}") from error
    return InputTensor("input_ids", "INT32", (1, len(ids)), data, is_empty=not ids)
