"""A snapshot as a file: safetensors, with a checksum over all of it, written whole or not at all.

    8 bytes   length of the header
    header    JSON: `__metadata__` with `format_version`, `session` (a snapshot's `Header`) and `checksum`; the tensors
    data      the snapshot's tensors, and its state as the bytes of a JSON text

The checksum is the SHA-256 of the file with zeros in the checksum's place. A snapshot that was claimed is its header
alone. Knows no sessions.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from microturn.errors import FailedPrecondition, ResourceExhausted
from microturn.snapshots.snapshot import Header, Snapshot

FORMAT_VERSION = 1

_STATE = "state"
_LEN_BYTES = 8
_NO_CHECKSUM = b"0" * 64
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
# Names and shapes take a few kilobytes; a file that claims more is none of ours.
_MAX_HEADER_BYTES = 1 << 20


class UnreadableSnapshot(Exception):
    """A file is damaged, or not a snapshot that this version reads; the argument says how."""


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot, readable for its owner only; in the place of a file that is there.

    Raises:
        ResourceExhausted: the disk is full. What was there is as before.
        FailedPrecondition: the file cannot be written for another reason.
    """
    content = _sealed(snapshot)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            temporary.rename(path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceExhausted(f"no room for {path}, {len(content)} bytes: free some space there") from error
        raise FailedPrecondition(f"cannot write {path}: {error.strerror}") from error


def read_snapshot(path: Path) -> Snapshot:
    """Reads a snapshot whose every byte is as it was written.

    Raises:
        UnreadableSnapshot: it is not.
        OSError: the file is not there, or not to be read.
    """
    content = bytearray(path.read_bytes())
    header_bytes = _header_bytes(content)
    header = _read_header(header_bytes)
    found = _CHECKSUM.search(header_bytes)
    if found is None:
        raise UnreadableSnapshot("it has no checksum")
    content[_LEN_BYTES + found.start(1) : _LEN_BYTES + found.end(1)] = _NO_CHECKSUM
    if hashlib.sha256(content).hexdigest().encode() != found[1]:
        raise UnreadableSnapshot("its checksum is wrong")
    try:
        tensors = safetensors.torch.load(bytes(content))
        state = json.loads(tensors.pop(_STATE).numpy().tobytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise UnreadableSnapshot(f"it does not hold a session: {error}") from error
    return Snapshot(header, state, tensors)


def read_header(path: Path) -> Header:
    """Reads what a snapshot says openly, claimed or not; the checksum is not looked at.

    Raises:
        UnreadableSnapshot, OSError: as `read_snapshot`.
    """
    with path.open("rb") as file:
        length = file.read(_LEN_BYTES)
        return _read_header(_header_bytes(length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))))


def claim(path: Path, claimed: Path) -> bool:
    """Renames a snapshot, so that nobody takes it up any more, and drops its content.

    Returns:
        Whether this was who claimed it: of several who try at once only one is told so.
    """
    try:
        path.rename(claimed)
    except FileNotFoundError:
        return False
    with claimed.open("rb") as file:
        header_len = int.from_bytes(file.read(_LEN_BYTES), "little")
    os.truncate(claimed, _LEN_BYTES + header_len)
    return True


def _sealed(snapshot: Snapshot) -> bytearray:
    state = json.dumps(snapshot.state).encode()
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "session": json.dumps(snapshot.header.as_json()),
        "checksum": _NO_CHECKSUM.decode(),
    }
    tensors = {_STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8), **snapshot.tensors}
    content = bytearray(safetensors.torch.save(tensors, metadata))
    # What a client wrote into the header cannot look like this: quotes within a string are escaped there.
    found = _CHECKSUM.search(content)
    assert found is not None, "safetensors writes JSON without spaces"
    content[found.start(1) : found.end(1)] = hashlib.sha256(content).hexdigest().encode()
    return content


def _header_bytes(content: bytes | bytearray) -> bytes:
    length = int.from_bytes(content[:_LEN_BYTES], "little")
    if length > _MAX_HEADER_BYTES or len(content) < _LEN_BYTES + length:
        raise UnreadableSnapshot("it is cut off, or not a snapshot")
    return bytes(content[_LEN_BYTES : _LEN_BYTES + length])


def _read_header(header_bytes: bytes) -> Header:
    try:
        metadata: dict[str, Any] = json.loads(header_bytes)["__metadata__"]
        version = int(metadata["format_version"])
        if version != FORMAT_VERSION:
            raise UnreadableSnapshot(f"it has format version {version}, and {FORMAT_VERSION} is read here")
        return Header.from_json(json.loads(metadata["session"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableSnapshot(f"its header is not that of a snapshot: {error!r}") from error


def _sync_directory(directory: Path) -> None:
    """Without it a rename may be forgotten when the machine stops."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
