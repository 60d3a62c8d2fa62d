"""An object in a bucket that is read as a file."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Any

from microturn.snapshots.s3_bucket import Bucket
from microturn.snapshots.storage import ReadInPieces

_PIECE_BYTES = 1 << 20


class S3File(ReadInPieces):
    """An `OpenFile`, as one stream from where it is read.

    Args:
        bucket: where the object is.
        key: of the object.
        file_id: of the file; None is the object's ETag.

    Raises:
        FileNotFoundError: there is no such object.
        OSError: it cannot be read.
    """

    def __init__(self, bucket: Bucket, key: str, file_id: Hashable | None = None) -> None:
        self._bucket = bucket
        self._key = key
        self._position = 0
        self._body: Any
        self._body, self._num_bytes, etag = bucket.get(key)
        self._file_id = etag if file_id is None else file_id

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def file_id(self) -> Hashable:
        return self._file_id

    def seek(self, position: int, /) -> int:
        if position != self._position:
            self._close()
            self._position = position
        return position

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._close()

    def _some(self, num_bytes: int) -> bytes:
        if num_bytes <= 0 or self._position >= self._num_bytes:
            return b""
        if self._body is None:
            self._body, _, _ = self._bucket.get(self._key, self._position)
        with self._bucket.errors(self._key):
            piece = bytes(self._body.read(min(num_bytes, _PIECE_BYTES)))
        self._position += len(piece)
        return piece

    def _close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None
