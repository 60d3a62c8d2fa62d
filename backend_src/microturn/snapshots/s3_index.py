"""What the names of one session stand for in a bucket: an object that is changed as a whole, or not at all.

    <digest>.index    JSON: {"files": {".snapshot": key of its content}, "changes": [marks of the last changes]}

A change is written on the condition that nobody else has written since it was read. So of two servers that move the
same name one does, as with a rename. An answer may be lost, and a repetition fails then: that a change was written is
seen by its mark.
"""

from __future__ import annotations

import errno
import json
import random
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from microturn.snapshots.s3_bucket import Bucket, Conflict
from microturn.snapshots.storage import Doubtful

SUFFIX = ".index"

_ATTEMPTS = 12
_PAUSE_S = 0.02
# So many changes of others may come between one and the look whether it was written.
_NUM_MARKS = 16


@dataclass(frozen=True)
class _Read:
    """An index as it was read; without an ETag there is none."""

    files: Mapping[str, str]
    marks: tuple[str, ...] = ()
    etag: str | None = None


# Gets what the names of a session stand for, and returns what they are to stand for; None leaves them.
Change = Callable[[Mapping[str, str]], Mapping[str, str] | None]


class S3Index:
    """The indexes in a bucket.

    Args:
        bucket: where they are.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def files(self, stem: str) -> Mapping[str, str]:
        """The keys of contents by suffix.

        Args:
            stem: the names without their suffix.

        Raises:
            OSError: the bucket does not answer, or what is there is no index.
        """
        return self._read(stem).files

    def change(self, stem: str, change: Change) -> Mapping[str, str] | None:
        """Changes what names stand for.

        Args:
            stem: the names without their suffix.
            change: see above; called again when another server was faster.

        Returns:
            What they stood for before; None if they were left.

        Raises:
            Doubtful: it may have been changed.
            OSError: as `files`; it is unchanged.
        """
        for attempt in range(_ATTEMPTS):
            before = self._read(stem)
            files = change(before.files)
            if files is None:
                return None
            mark = secrets.token_hex(8)
            written = {"files": dict(files), "changes": [*before.marks[1 - _NUM_MARKS :], mark]}
            failure: OSError | None = None
            key = stem + SUFFIX
            try:
                self._bucket.put_if(key, json.dumps(written).encode(), before.etag)
            except Conflict:
                pass
            except OSError as error:
                failure = error
            else:
                return before.files
            try:
                is_written = mark in self._read(stem).marks
            except OSError as error:
                failure = error
            else:
                if is_written:
                    return before.files
            if failure is not None:  # a request that was given up may still be under way
                raise Doubtful(errno.EIO, str(failure.strerror), self._bucket.place_of(key)) from failure
            time.sleep(random.uniform(0, _PAUSE_S * (attempt + 1)))
        raise OSError(errno.EBUSY, "others change it all the time", self._bucket.place_of(stem + SUFFIX))

    def drop_empty(self, stem: str) -> None:
        """Removes an index in which no names are left."""
        found = self._read(stem)
        if not found.files and found.etag is not None:
            with suppress(Conflict):  # there are some by now
                self._bucket.delete(stem + SUFFIX, found.etag)

    def _read(self, stem: str) -> _Read:
        key = stem + SUFFIX
        try:
            content, etag = self._bucket.get_small(key)
        except FileNotFoundError:
            return _Read({})
        try:
            said = json.loads(content)
            files = {str(suffix): str(of) for suffix, of in said["files"].items()}
            return _Read(files, tuple(map(str, said["changes"])), etag)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise OSError(errno.EIO, f"it is no index: {error!r}", self._bucket.place_of(key)) from error
