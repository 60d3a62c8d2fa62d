"""The file format of a snapshot: safetensors with a checksum, in a storage.

    8 bytes   length of the header
    header    JSON: `__metadata__` with `format_version`, `session` (a snapshot's `Header`) and `checksum`; the tensors
    data      the snapshot's tensors, and its state as JSON bytes
    KV        optional: each tensor of all pages (see `kv_part`)

The checksum is the SHA-256 of the file up to its KV, with zeros in the checksum's place. A claimed snapshot is reduced
to its header once its KV is not needed any more.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from microturn.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from microturn.kv.image import KVImage
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import ALIGNMENT, LENGTH_BYTES, MAX_HEADER_BYTES, DamagedFile, header_bytes
from microturn.snapshots.encrypted_file import MAGIC
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.kv_part import PREFIX, KVPart, add_to_header
from microturn.snapshots.snapshot import Header, Snapshot
from microturn.snapshots.storage import Content, Doubtful, Storage

log = logging.getLogger(__name__)

# Older servers read version 1 only. Version 2 is for sessions with dropped inputs, which those would take for complete.
FORMAT_VERSIONS = (1, 2)

_STATE = "state"
_NO_CHECKSUM = b"0" * 64
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
# Between two pieces of KV its deadline is looked at.
_PIECE_BYTES = 16 << 20


class UnreadableSnapshot(DamagedFile):
    """A file is damaged, or not a snapshot that this version reads; the argument is the reason."""


class NewerSnapshot(UnreadableSnapshot):
    """A newer version of Microturn wrote the file and can read it."""


def write_snapshot(path: Path, snapshot: Snapshot, kv: KVCopy | None = None, *, until_s: float = math.inf) -> None:
    """Writes a snapshot with mode 0600, replacing an existing file.

    Args:
        path: of the file.
        snapshot: a session.
        kv: its KV; None to leave it out.
        until_s: deadline of writing KV, by `time.monotonic`.

    Raises:
        ResourceExhausted, DeadlineExceeded, FailedPrecondition: as `write`.
    """
    write(FileStorage(path.parent), path.name, content_of(snapshot, kv, until_s=until_s))


def write(storage: Storage, name: str, content: Content) -> None:
    """Writes a file into a storage.

    Raises:
        ResourceExhausted: the storage is full. An existing file is unchanged.
        DeadlineExceeded: writing the KV took too long. An existing file is unchanged.
        Unavailable: it is not known whether the file was written.
        FailedPrecondition: the file cannot be written for another reason.
    """
    try:
        storage.write(name, content)
    except Doubtful as error:
        raise Unavailable(f"{storage.place_of(name)} may have been written or not: {error.strerror}") from error
    except OSError as error:
        place = storage.place_of(name)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceExhausted(f"no room for {place}, {content.num_bytes} bytes: free some space there") from error
        raise FailedPrecondition(f"cannot write {place}: {error.strerror}") from error


def content_of(snapshot: Snapshot, kv: KVCopy | None = None, *, until_s: float = math.inf) -> Content:
    """What stands in the file of a snapshot, with the arguments of `write_snapshot`."""
    before_kv = memoryview(sealed(snapshot, kv))
    head_len = LENGTH_BYTES + int.from_bytes(before_kv[:LENGTH_BYTES], "little")
    body = [before_kv[head_len:]] if kv is None else chain([before_kv[head_len:]], pieces_of(kv.pages, until_s))
    num_bytes = len(before_kv) + (0 if kv is None else kv.pages.num_bytes)
    return Content(before_kv[:head_len], body, num_bytes)


def pieces_of(pages: KVImage, until_s: float = math.inf) -> Iterator[memoryview]:
    """The bytes of pages, in small pieces.

    Args:
        pages: what is being written.
        until_s: deadline by `time.monotonic`.

    Raises:
        DeadlineExceeded: it has passed.
    """
    num_written = 0
    for piece in pages.contents():
        for start in range(0, len(piece), _PIECE_BYTES):
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(f"{num_written} of {pages.num_bytes} bytes of KV were written in time")
            yield piece[start : start + _PIECE_BYTES]
            num_written += len(piece[start : start + _PIECE_BYTES])


def read_snapshot(path: Path) -> Snapshot:
    """Reads a snapshot and verifies its checksum, which covers all but its KV.

    Raises:
        UnreadableSnapshot: it is damaged.
        OSError: the file is missing or cannot be read.
    """
    with FileStorage(path.parent).open(path.name) as file:
        return read_from(file, file.num_bytes)


class Readable(Protocol):
    """What a snapshot is read from."""

    def read(self, num_bytes: int, /) -> bytes: ...


def read_from(file: Readable, num_bytes: int) -> Snapshot:
    """Reads a snapshot up to its KV, as `read_snapshot`; the stream is then at the KV.

    Args:
        file: at the snapshot's beginning; it need not be seekable.
        num_bytes: of the snapshot with its KV.
    """
    text = _read_header_bytes(file)
    header = _read_header(text)
    entries, kv = _read_entries(text)
    data = file.read((num_bytes if kv is None else min(num_bytes, kv.start)) - LENGTH_BYTES - len(text))
    found = _CHECKSUM.search(text)
    if found is None:
        raise UnreadableSnapshot("it has no checksum")
    zeroed = text[: found.start(1)] + _NO_CHECKSUM + text[found.end(1) :]
    if hashlib.sha256(len(text).to_bytes(LENGTH_BYTES, "little") + zeroed + data).hexdigest().encode() != found[1]:
        raise UnreadableSnapshot("its checksum is wrong")
    try:
        tensors = safetensors.torch.load(header_bytes(entries) + data)
        state = json.loads(tensors.pop(_STATE).numpy().tobytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise UnreadableSnapshot(f"it does not hold a session: {error}") from error
    return Snapshot(header, state, tensors, kv)


def read_header(file: Readable) -> Header:
    """Reads the header of a snapshot, claimed or not, without verifying the checksum.

    Args:
        file: at the snapshot's beginning.

    Raises:
        UnreadableSnapshot, OSError: as `read_snapshot`.
    """
    return _read_header(_read_header_bytes(file))


def sealed(snapshot: Snapshot, kv: KVCopy | None, *, is_checked: bool = True) -> bytearray:
    """The bytes of the file before the KV.

    Args:
        snapshot: a session.
        kv: what follows.
        is_checked: see `kv_part.add_to_header`.
    """
    state = json.dumps(snapshot.state).encode()
    state += b" " * (-(len(state) + sum(tensor.nbytes for tensor in snapshot.tensors.values())) % ALIGNMENT)
    metadata = {
        "format_version": str(snapshot.format_version),
        "session": json.dumps(snapshot.header.as_json()),
        "checksum": _NO_CHECKSUM.decode(),
    }
    tensors = {_STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8), **snapshot.tensors}
    content = bytearray(safetensors.torch.save(tensors, metadata))
    if kv is not None:
        data_start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        header, data = json.loads(content[LENGTH_BYTES:data_start]), content[data_start:]
        add_to_header(header, kv, len(data), is_checked=is_checked)
        content = bytearray(header_bytes(header)) + data
    # A client's strings in the header cannot match this: quotes within a string are escaped.
    found = _CHECKSUM.search(content)
    assert found is not None, "safetensors writes JSON without spaces"
    content[found.start(1) : found.end(1)] = hashlib.sha256(content).hexdigest().encode()
    return content


def _read_header_bytes(file: Readable) -> bytes:
    """Reads the header of a file; the file position is then at its data."""
    first = file.read(LENGTH_BYTES)
    if first == MAGIC:
        raise UnreadableSnapshot("it is encrypted: name the file with its secret in snapshot_key_file")
    length = int.from_bytes(first, "little")
    text = file.read(min(length, MAX_HEADER_BYTES))
    if len(text) < length:
        raise UnreadableSnapshot("it is cut off, or not a snapshot")
    return text


def _read_entries(text: bytes) -> tuple[Mapping[str, Any], KVPart | None]:
    """The header's entries of the tensors before the KV, and the KV part."""
    try:
        header: dict[str, Any] = json.loads(text)
        kv = KVPart.of_header(header, LENGTH_BYTES + len(text))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableSnapshot(f"its header is not that of a snapshot: {error!r}") from error
    return {name: entry for name, entry in header.items() if not name.startswith(PREFIX)}, kv


def _read_header(text: bytes) -> Header:
    try:
        metadata: dict[str, Any] = json.loads(text)["__metadata__"]
        version = int(metadata["format_version"])
        if version > FORMAT_VERSIONS[-1]:
            raise NewerSnapshot(f"it has format version {version}, and {FORMAT_VERSIONS[-1]} is read here")
        if version not in FORMAT_VERSIONS:
            raise UnreadableSnapshot(f"it has format version {version}, and {FORMAT_VERSIONS[-1]} is read here")
        return Header.from_json(json.loads(metadata["session"]))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableSnapshot(f"its header is not that of a snapshot: {error!r}") from error
