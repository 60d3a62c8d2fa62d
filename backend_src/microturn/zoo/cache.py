"""Keeps models that were made from something else: each is made once, whole or not at all.

A model in the cache is a directory with a manifest, which is renamed into place when it is complete; a killed builder
leaves a hidden directory that the next builder removes. Builders wait for each other by a file lock; readers need none.
A cached model costs only a few `stat` calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from microturn.errors import FailedPrecondition, ResourceExhausted

_MANIFEST = "microturn-manifest.json"
_CONVERSION_VERSION = 1  # increase it when the conversion changes: caches are then rebuilt


class Source(Protocol):
    """What a model in the cache is made from."""

    @property
    def name(self) -> str:
        """Of the model's directory in the cache, and in messages."""

    @property
    def facts(self) -> Mapping[str, object]:
        """What identifies the source, in JSON; a model that was made from other facts is made anew.

        Errors:
            InvalidArgument: the source cannot be read.
        """

    def peak_disk_bytes(self) -> int:
        """Maximum disk space for the conversion, in the cache directory.

        Errors:
            InvalidArgument: the source cannot be converted.
        """

    def convert(self, model_dir: Path) -> None:
        """Creates `model_dir`; its parent is an empty directory for temporary files, which is removed."""


def default_cache_dir() -> Path:
    """``$MICROTURN_CACHE``, else ``~/.cache/microturn``."""
    chosen = os.environ.get("MICROTURN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "microturn"


def prepare(source: Source, cache_dir: Path) -> Path:
    """The directory of a model in the cache, absolute; it is made if missing, damaged or of another source.

    Errors:
        InvalidArgument: the source cannot be converted; nothing has been written.
        Unavailable: the source cannot be fetched.
        ResourceExhausted: the cache's disk is too full.
        FailedPrecondition: the cache cannot be read or written.
    """
    model_dir = cache_dir.resolve() / source.name
    with _disk_errors_explained(source, cache_dir):
        if _is_intact(model_dir, source):
            return model_dir
        num_bytes = source.peak_disk_bytes()
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _sole_builder(source, cache_dir):
            if not _is_intact(model_dir, source):  # another process may have built it meanwhile
                _build(source, num_bytes, model_dir)
    return model_dir


def _build(source: Source, num_bytes: int, model_dir: Path) -> None:
    cache_dir = model_dir.parent
    for leftover in cache_dir.glob(f".{source.name}-*"):
        shutil.rmtree(leftover)
    if shutil.disk_usage(cache_dir).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=cache_dir))
    try:
        new_dir = staging / source.name
        source.convert(new_dir)
        _write_manifest(new_dir, source)
        if model_dir.exists():
            model_dir.rename(staging / "replaced")
        new_dir.rename(model_dir)
    finally:
        shutil.rmtree(staging)


def _write_manifest(model_dir: Path, source: Source) -> None:
    files = {}
    for path in sorted(path for path in model_dir.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            files[path.relative_to(model_dir).as_posix()] = {
                "num_bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    manifest = {"conversion_version": _CONVERSION_VERSION, **source.facts, "files": files}
    (model_dir / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _is_intact(model_dir: Path, source: Source) -> bool:
    """Whether the manifest is of this source and conversion, and every file has the recorded size."""
    try:
        manifest = json.loads((model_dir / _MANIFEST).read_bytes())
        return (
            manifest["conversion_version"] == _CONVERSION_VERSION
            and all(manifest[key] == value for key, value in source.facts.items())
            and all((model_dir / name).stat().st_size == file["num_bytes"] for name, file in manifest["files"].items())
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _sole_builder(source: Source, cache_dir: Path) -> Iterator[None]:
    """Holds the model's build lock, which the system releases when the process dies."""
    with (cache_dir / f".{source.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{source.name}: waiting for another process that is preparing it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors_explained(source: Source, cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            megabytes = source.peak_disk_bytes() // 1_000_000
            raise ResourceExhausted(
                f"preparing {source.name} needs {megabytes} MB in {cache_dir}: "
                "free some space there or set MICROTURN_CACHE to another directory"
            ) from error
        raise FailedPrecondition(
            f"cannot use the model cache {cache_dir} ({error.strerror or error}): "
            "set MICROTURN_CACHE to a directory that you may write"
        ) from error
