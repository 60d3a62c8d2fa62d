"""A copy of KV in a safetensors file, and the check that it is unchanged when it is read.

    8 bytes   length of the header
    header    JSON: each tensor's dtype, shape and place; `__metadata__`: model, page size, table, checksum of tensors
    tensors   each of all pages

The reader knows the expected header to the last byte: so the header is compared and never trusted, and a flipped bit
anywhere in the file is found. The safetensors library is not used because it holds the GIL while it reads and writes,
and running turns would wait; it can open these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState

# safetensors' names of element types.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}
LENGTH_BYTES = 8
# Names and shapes take a few kilobytes; a file with a longer header is not one of ours.
MAX_HEADER_BYTES = 1 << 20
# The library aligns tensors like this, and refuses other files on some paths.
ALIGNMENT = 8


class DamagedFile(Exception):
    """A file differs from what was written."""


def checksum_of(image: KVImage) -> str:
    """A hash of all bytes of the tensors."""
    digest = hashlib.blake2b(digest_size=32)
    for piece in image.contents():
        digest.update(piece)
    return digest.hexdigest()


def write_image(path: Path, image: KVImage, model: str, state: TableState) -> str:
    """Writes a file atomically.

    It does not call fsync: only this process uses the file, and all of it is checked when it is read.

    Args:
        path: of the file.
        image: the tensors.
        model: the model's fingerprint.
        state: of the page table that the pages belong to.

    Returns:
        the checksum that `read_image` takes.

    Raises:
        OSError: it cannot be written; no partial file is left.
    """
    checksum = checksum_of(image)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(_head(image, model, state, checksum))
            for piece in image.contents():
                file.write(piece)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return checksum


def read_image(path: Path, image: KVImage, model: str, state: TableState, checksum: str) -> None:
    """Reads a file into an image of its shape.

    Raises:
        DamagedFile: it differs from what was written with this model, state and checksum; the image is invalid.
        OSError: it is missing or cannot be read.
    """
    expected = _head(image, model, state, checksum)
    with path.open("rb", buffering=0) as file:
        head = file.read(len(expected))
        if head != expected:
            raise DamagedFile(_difference(path, model))
        read_tensors(file, image, checksum)


def read_tensors(file: TensorFile, image: KVImage, checksum: str) -> None:
    """Reads the tensors at the end of a file into an image of their shape.

    Args:
        file: unbuffered, at the first tensor.
        image: the target.
        checksum: of the tensors.

    Raises:
        DamagedFile: their checksum differs; the image is invalid.
        OSError: the file cannot be read.
    """
    num_bytes = sum(read_into(file, piece) for piece in image.contents())
    if num_bytes < image.num_bytes:
        raise DamagedFile(f"{num_bytes} bytes of tensors are not {image.num_bytes}")
    if file.read(1):
        raise DamagedFile(f"more bytes of tensors than {image.num_bytes}")
    if checksum_of(image) != checksum:
        raise DamagedFile("the checksum of the tensors differs")


def tensor_entries(image: KVImage, name: str = "{}", first_byte: int = 0) -> Mapping[str, Mapping[str, Any]]:
    """The header entries of an image's tensors: safetensors type, shape and offsets.

    Args:
        image: the tensors.
        name: format of their names, given the tensor's number.
        first_byte: offset of the first tensor behind the header.
    """
    return {
        name.format(index): {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": [image.num_pages, *part.shape],
            "data_offsets": [first_byte + start, first_byte + start + image.num_pages * part.num_bytes],
        }
        for index, (part, start) in enumerate(zip(image.parts, image.offsets, strict=True))
    }


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """A safetensors header with its length before it, padded so that the tensors behind it are aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _head(image: KVImage, model: str, state: TableState, checksum: str) -> bytes:
    """The bytes of the file before the tensors."""
    metadata = {
        "format": "microturn-kv-1",
        "model": model,
        "page_size": str(state.page_size),
        "table": json.dumps(asdict(state)),
        "checksum": checksum,
    }
    return header_bytes({"__metadata__": metadata, **tensor_entries(image)})


def _difference(path: Path, expected_model: str) -> str:
    """The reason why a file's header is not the expected one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        model = json.loads(header)["__metadata__"]["model"]
    except (ValueError, KeyError, TypeError):
        return "its header is damaged"
    return "its header is of another session's KV" if model == expected_model else "it is of another model"


class ReadsInto(Protocol):
    """What pages are read from: a file without a buffer, or a connection."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class TensorFile(ReadsInto, Protocol):
    """A file that ends with tensors."""

    def read(self, num_bytes: int, /) -> bytes: ...


def read_into(file: ReadsInto, buffer: memoryview) -> int:
    """Reads until the buffer is full or the file ends; returns the number of bytes."""
    num_read = 0
    while num_read < len(buffer) and (num := file.readinto(buffer[num_read:])):
        num_read += num
    return num_read
