"""A bucket that speaks S3, as far as snapshots need one. The extra `microturn[s3]` installs what this imports.

Credentials, region and endpoint come from boto3's environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, a role, …).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from microturn.snapshots.storage import Content, Listed

# A storage that hangs gives a thread back after the time that a START waits, twice at most.
_CONNECT_S, _READ_S, _ATTEMPTS = 3, 5, 2
# Threads that look for sessions and those that save.
_NUM_CONNECTIONS = 32
# Parts of an upload; S3 wants 5 MiB and more, and at most 10,000.
_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000
_NOT_THERE = ("NoSuchKey", "404", "NotFound")
# A condition does not hold, or somebody else writes just now.
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NO_ROOM = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507")


class Conflict(Exception):
    """An object is not what it has to be for a change."""


class Bucket:
    """A bucket, or what begins with a prefix in it; callable in any thread.

    All methods raise OSError where the storage does not answer or refuses, FileNotFoundError where there is no such
    object or bucket.

    Args:
        name: of the bucket.
        prefix: of all keys.

    Raises:
        OSError: the environment does not say enough.
    """

    def __init__(self, name: str, prefix: str) -> None:
        self._name = name
        self._prefix = prefix
        try:
            with self._errors(""):
                session = boto3.session.Session()
                self._client = _client(session, "auto")
                # Others rarely have a host name for each bucket.
                if "amazonaws.com" not in self._client.meta.endpoint_url:
                    self._client = _client(session, "path")
        except ValueError as error:  # an endpoint that is no address
            raise OSError(errno.EINVAL, str(error), self.place_of("")) from error

    def place_of(self, key: str) -> str:
        """Where an object is, for people."""
        return f"s3://{self._name}/{self._prefix}{key}"

    def get(self, key: str, first: int = 0, num_bytes: int | None = None) -> tuple[Any, int, str]:
        """Begins to read an object.

        Args:
            key: of it.
            first: offset of the first byte.
            num_bytes: how many; None is all.

        Returns:
            Its content as a stream, which `errors` is to be put around, the number of bytes in it, and the object's
            ETag.
        """
        end = "" if num_bytes is None else first + num_bytes - 1
        ranged = {"Range": f"bytes={first}-{end}"} if first or num_bytes is not None else {}
        with self._errors(key):
            answer = self._client.get_object(**self._at(key), **ranged)
        return answer["Body"], int(answer["ContentLength"]), str(answer["ETag"])

    def get_small(self, key: str) -> tuple[bytes, str]:
        """The content of an object and its ETag."""
        body, num_bytes, etag = self.get(key)
        with self._errors(key):
            return bytes(body.read(num_bytes)), etag

    def etag_of(self, key: str) -> str | None:
        """The ETag of an object; None if there is none."""
        try:
            with self._errors(key):
                return str(self._client.head_object(**self._at(key))["ETag"])
        except FileNotFoundError:
            return None

    def put(self, key: str, content: bytes) -> None:
        """Writes an object, replacing one that is there."""
        with self._errors(key):
            self._client.put_object(**self._at(key), Body=content)

    def put_if(self, key: str, content: bytes, etag: str | None) -> None:
        """Writes an object if the one that is there has an ETag, or, with None, if there is none.

        Raises:
            Conflict: it is another one. An answer may have been lost: then this call may have written it.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            with self._errors(key, has_condition=True):
                self._client.put_object(**self._at(key), Body=content, **condition)
        except FileNotFoundError as error:
            raise Conflict from error

    def put_pieces(self, key: str, content: Content) -> None:
        """Writes an object piece by piece, replacing one that is there when all has come."""
        if content.num_bytes <= _PART_BYTES:
            self.put(key, b"".join(content.pieces()))
            return
        part_bytes = max(_PART_BYTES, -(-content.num_bytes // _MAX_PARTS))
        with self._errors(key):
            upload = {**self._at(key), "UploadId": self._client.create_multipart_upload(**self._at(key))["UploadId"]}
        try:
            parts = []
            for number, part in enumerate(_parts(content, part_bytes), 1):
                with self._errors(key):
                    answer = self._client.upload_part(**upload, PartNumber=number, Body=part)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            with self._errors(key):
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with suppress(OSError), self._errors(key):
                self._client.abort_multipart_upload(**upload)
            raise

    def delete(self, key: str, etag: str | None = None) -> None:
        """Deletes an object, if it is there; with an ETag, if it has that.

        Raises:
            Conflict: it has another.
        """
        with suppress(FileNotFoundError), self._errors(key, has_condition=etag is not None):
            self._client.delete_object(**self._at(key), **({} if etag is None else {"IfMatch": etag}))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """The objects whose keys begin with a prefix."""
        begin = self._prefix + prefix
        token: dict[str, str] = {}
        while True:
            with self._errors(prefix):
                answer = self._client.list_objects_v2(Bucket=self._name, Prefix=begin, **token)
            for found in answer.get("Contents", ()):
                yield Listed(found["Key"][len(self._prefix) :], found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def errors(self, key: str) -> Any:
        """Around reading a stream that `get` returned: raises OSError for what that raises."""
        return self._errors(key)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._name, "Key": self._prefix + key}

    @contextmanager
    def _errors(self, key: str, *, has_condition: bool = False) -> Iterator[None]:
        place = self.place_of(key)
        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if has_condition and code in _CONFLICTS:
                raise Conflict(place) from error
            if code in _NOT_THERE:
                raise FileNotFoundError(errno.ENOENT, f"{error}", place) from error
            raise OSError(errno.ENOSPC if code in _NO_ROOM else errno.EIO, f"{error}", place) from error
        except BotoCoreError as error:
            raise OSError(errno.EIO, f"{error}", place) from error


def _client(session: Any, addressing: str) -> Any:
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        max_pool_connections=_NUM_CONNECTIONS,
        # Storages other than Amazon's do not all know the checksums that boto3 adds by itself.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": addressing},
    )
    return session.client("s3", config=config)


def _parts(content: Content, part_bytes: int) -> Iterator[bytes]:
    """The bytes of a file in parts of one size, but the last."""
    waiting = bytearray()
    for piece in content.pieces():
        waiting += piece
        at = 0
        while len(waiting) - at >= part_bytes:
            yield bytes(waiting[at : at + part_bytes])
            at += part_bytes
        del waiting[:at]
    if waiting:
        yield bytes(waiting)
