"""Snapshots in a bucket that speaks S3.

    <digest>.index                   which of the contents has which name; see `s3_index`
    .<digest>.snapshot.<random>      a content, never changed; of none that is named there a writer has died
    <digest>.kv/<epoch>              KV in files of its own

A bucket has no rename, so that a file of the top is moved by a change of the session's index, and its content stays
where it is.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from typing import Self

from microturn.errors import InvalidArgument
from microturn.snapshots.s3_bucket import Bucket, Conflict
from microturn.snapshots.s3_file import S3File
from microturn.snapshots.s3_index import SUFFIX, S3Index
from microturn.snapshots.storage import Content, Listed

log = logging.getLogger(__name__)

# When an index without names is removed. It is removed on a condition, which not all storages know.
_EMPTY_S = 3600.0
# Between a look into an index and opening a content that may have been replaced.
_ATTEMPTS = 4


class S3Storage:
    """A `Storage`.

    Args:
        bucket: which writes on conditions.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._index = S3Index(bucket)

    @classmethod
    def at(cls, url: str) -> Self:
        """The storage at ``s3://bucket/prefix``.

        Raises:
            InvalidArgument: it cannot be used.
        """
        name, _, prefix = url.removeprefix("s3://").partition("/")
        if not name:
            raise InvalidArgument(f"snapshot_dir is s3://bucket/prefix, not '{url}'")
        try:
            bucket = Bucket(name, f"{prefix.strip('/')}/" if prefix.strip("/") else "")
            _check(bucket)
        except OSError as error:
            raise InvalidArgument(f"snapshot_dir {url} cannot be used: {error.strerror}") from error
        return cls(bucket)

    def place_of(self, name: str) -> str:
        return self._bucket.place_of(name)

    def write(self, name: str, content: Content) -> None:
        if _is_key(name):
            self._bucket.put_pieces(name, content)
            return
        key = _new_key(name)
        self._bucket.put_pieces(key, content)
        stem, suffix = _split(name)
        # Where this fails it may be named all the same, so that it stays.
        before = self._index.change(stem, lambda files: {**files, suffix: key})
        self._drop(before, suffix)

    def open(self, name: str) -> S3File:
        if _is_key(name):
            return S3File(self._bucket, name)
        stem, suffix = _split(name)
        for _ in range(_ATTEMPTS):
            key = self._index.files(stem).get(suffix)
            if key is None:
                raise FileNotFoundError(self.place_of(name))
            try:
                return S3File(self._bucket, key, key)
            except FileNotFoundError:
                continue  # it has been replaced
        raise FileNotFoundError(self.place_of(name))

    def id_of(self, name: str) -> Hashable | None:
        if _is_key(name):
            return self._bucket.etag_of(name)
        stem, suffix = _split(name)
        return self._index.files(stem).get(suffix)

    def move(self, name: str, to: str) -> bool:
        (stem, suffix), (_, to_suffix) = _split(name), _split(to)

        def change(files: Mapping[str, str]) -> Mapping[str, str] | None:
            if suffix not in files:
                return None
            return {**_without(files, suffix), to_suffix: files[suffix]}

        before = self._index.change(stem, change)
        self._drop(before, to_suffix)
        return before is not None

    def cut(self, name: str, file_id: Hashable, num_bytes: int) -> None:
        stem, suffix = _split(name)
        content = self._index.files(stem).get(suffix)
        if content is None or content != file_id:
            return
        try:
            with S3File(self._bucket, content) as file:
                head = file.read(num_bytes)
        except FileNotFoundError:
            return  # it has been replaced
        key = _new_key(name)
        self._bucket.put(key, head)
        before = self._index.change(
            stem, lambda files: {**files, suffix: key} if files.get(suffix) == file_id else None
        )
        self._drop({suffix: key} if before is None else before, suffix)

    def remove(self, name: str, file_id: Hashable | None = None) -> None:
        if _is_key(name):
            self._bucket.delete(name)
            return
        stem, suffix = _split(name)

        def change(files: Mapping[str, str]) -> Mapping[str, str] | None:
            if suffix not in files or (file_id is not None and files[suffix] != file_id):
                return None
            return _without(files, suffix)

        self._drop(self._index.change(stem, change), suffix)

    def names_in(self, folder: str) -> Collection[str]:
        return {listed.name.removeprefix(f"{folder}/") for listed in self._bucket.list(f"{folder}/")}

    def keep_only(self, folder: str, names: Collection[str] = ()) -> None:
        for name in self.names_in(folder):
            if name not in names:
                self._bucket.delete(f"{folder}/{name}")

    def files(self) -> Iterator[Listed]:
        folders: dict[str, float] = {}
        contents: dict[str, float] = {}
        indexes: dict[str, float] = {}
        for listed in self._bucket.list():
            folder, slash, _ = listed.name.partition("/")
            if slash:
                folders[folder] = max(folders.get(folder, 0.0), listed.written_s)
            elif listed.name.startswith("."):
                contents[listed.name] = listed.written_s
            elif listed.name.endswith(SUFFIX):
                indexes[listed.name.removesuffix(SUFFIX)] = listed.written_s
        yield from (Listed(name, written_s) for name, written_s in folders.items())
        for stem, written_s in indexes.items():
            try:
                named = self._index.files(stem)
                if not named and written_s + _EMPTY_S < time.time():
                    self._index.drop_empty(stem)
            except OSError as error:
                log.error("cannot check whether %s has expired: %s", self.place_of(stem + SUFFIX), error)
                continue
            for suffix, key in named.items():
                yield Listed(stem + suffix, contents.pop(key, written_s))
        yield from (Listed(name, written_s) for name, written_s in contents.items())

    def _drop(self, before: Mapping[str, str] | None, suffix: str) -> None:
        """Deletes the content of a name that stands for another by now."""
        if before is not None and suffix in before:
            try:
                self._bucket.delete(before[suffix])
            except OSError as error:  # what was to be done is done, and this goes when it has expired
                log.warning("an old content stays: %s", error)


def _check(bucket: Bucket) -> None:
    """Checks that a bucket can be written, and on conditions, without which two servers may take up one session.

    Raises:
        InvalidArgument: it does not know conditions.
        OSError: it cannot be written.
    """
    key = _new_key("probe.snapshot")  # where this process dies it is removed like what one was writing
    with suppress(Conflict):  # boto3 has tried it twice
        bucket.put_if(key, b"", None)
    try:
        for etag in (None, '"another"'):
            try:
                bucket.put_if(key, b"", etag)
            except Conflict:
                continue
            raise InvalidArgument(
                f"{bucket.place_of('')} writes objects without looking at If-Match and If-None-Match: several servers "
                "could take up one session, so snapshots cannot be kept there"
            )
    finally:
        bucket.delete(key)


def _is_key(name: str) -> bool:
    """Whether a file is in a folder, or was left by a writer: then its name is its key."""
    return "/" in name or name.startswith(".")


def _split(name: str) -> tuple[str, str]:
    stem, point, suffix = name.partition(".")
    return stem, point + suffix


def _new_key(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


def _without(files: Mapping[str, str], suffix: str) -> dict[str, str]:
    return {one: key for one, key in files.items() if one != suffix}
