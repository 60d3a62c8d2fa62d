"""Resolves a model: checks a user's directory, or prepares an embedded model once in a cache.

The cache is ``$MICROTURN_CACHE``, else ``~/.cache/microturn``. A model in it is a directory with a manifest, which is
renamed into place when it is complete; a killed builder leaves a hidden directory that the next builder removes.
Builders wait for each other by a file lock; readers need none. A cached model costs only a few `stat` calls.
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
from collections.abc import Iterator
from pathlib import Path

from microturn.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from microturn.zoo.embedded_models import EMBEDDED_MODELS, EmbeddedModel, fetch_gguf

_MANIFEST = "microturn-manifest.json"
_CONVERSION_VERSION = 1  # increase it when the conversion changes: caches are then rebuilt


def resolve_model(model: str, *, cache_dir: Path | None = None) -> Path:
    """The Hugging Face directory of a model, absolute.

    Args:
        model: a model directory, or the name of an embedded model; give a directory of the same name with a slash. An
            embedded model that is not cached is downloaded and converted.
        cache_dir: cache of embedded models; None is ``$MICROTURN_CACHE`` or ``~/.cache/microturn``.

    Errors:
        InvalidArgument: there is no such directory or name, or the directory is incomplete.
        Unavailable: the embedded model cannot be downloaded, or differs from the pinned one.
        ResourceExhausted: the cache's disk is too full.
        FailedPrecondition: the cache cannot be read or written.
    """
    if model in EMBEDDED_MODELS:
        return prepare_embedded_model(EMBEDDED_MODELS[model], cache_dir or default_cache_dir())
    path = Path(model).expanduser().resolve()
    if not path.exists() and os.sep not in model:
        raise InvalidArgument(
            f"unknown model '{model}': give a model directory or one of {', '.join(sorted(EMBEDDED_MODELS))}"
        )
    _check_model_dir(path)
    return path


def default_cache_dir() -> Path:
    """``$MICROTURN_CACHE``, else ``~/.cache/microturn``."""
    chosen = os.environ.get("MICROTURN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "microturn"


def prepare_embedded_model(model: EmbeddedModel, cache_dir: Path) -> Path:
    """The directory of an embedded model in the cache; it is built if missing or damaged.

    Errors: as `resolve_model`, without InvalidArgument.
    """
    model_dir = cache_dir.resolve() / model.name
    with _disk_errors_explained(model, cache_dir):
        if _is_intact(model_dir, model):
            return model_dir
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _sole_builder(model, cache_dir):
            if not _is_intact(model_dir, model):  # another process may have built it meanwhile
                _build(model, model_dir)
    return model_dir


def _build(model: EmbeddedModel, model_dir: Path) -> None:
    from microturn.zoo.gguf_conversion import convert_gguf  # imports numpy, gguf, tokenizers: only to convert

    cache_dir = model_dir.parent
    for leftover in cache_dir.glob(f".{model.name}-*"):
        shutil.rmtree(leftover)
    if shutil.disk_usage(cache_dir).free < model.peak_disk_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=cache_dir))
    try:
        new_dir = staging / model.name
        convert_gguf(fetch_gguf(model, staging), new_dir, label=model.name)
        _write_manifest(new_dir, model)
        if model_dir.exists():
            model_dir.rename(staging / "damaged")
        new_dir.rename(model_dir)
    finally:
        shutil.rmtree(staging)


def _write_manifest(model_dir: Path, model: EmbeddedModel) -> None:
    files = {}
    for path in sorted(model_dir.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {
                "num_bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    manifest = {
        "conversion_version": _CONVERSION_VERSION,
        "gguf_sha256": model.gguf_sha256,
        "packages": [part.requirement for part in model.parts],
        "license": model.license,
        "files": files,
    }
    (model_dir / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _is_intact(model_dir: Path, model: EmbeddedModel) -> bool:
    """Whether the manifest is of this model and conversion, and every file has the recorded size."""
    try:
        manifest = json.loads((model_dir / _MANIFEST).read_bytes())
        return (
            manifest["conversion_version"] == _CONVERSION_VERSION
            and manifest["gguf_sha256"] == model.gguf_sha256
            and all((model_dir / name).stat().st_size == file["num_bytes"] for name, file in manifest["files"].items())
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _sole_builder(model: EmbeddedModel, cache_dir: Path) -> Iterator[None]:
    """Holds the model's build lock, which the system releases when the process dies."""
    with (cache_dir / f".{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{model.name}: waiting for another process that is preparing it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors_explained(model: EmbeddedModel, cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            megabytes = model.peak_disk_bytes // 1_000_000
            raise ResourceExhausted(
                f"preparing {model.name} needs {megabytes} MB in {cache_dir}: "
                "free some space there or set MICROTURN_CACHE to another directory"
            ) from error
        raise FailedPrecondition(
            f"cannot use the model cache {cache_dir} ({error.strerror or error}): "
            "set MICROTURN_CACHE to a directory that you may write"
        ) from error


def _check_model_dir(path: Path) -> None:
    """Errors: InvalidArgument: it is not a directory with a config and complete weights."""
    if not path.is_dir():
        raise InvalidArgument(f"{path} is {'a file' if path.exists() else 'not there'}: give a model directory")
    try:
        json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise InvalidArgument(f"the model directory {path} has no config.json") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the model directory {path} has a config.json that cannot be read: {error}") from None
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        try:
            shards = set(json.loads(index_path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"{index_path} cannot be read as an index of weights: {error!r}") from None
        if missing := sorted(shard for shard in shards if not (path / shard).is_file()):
            raise InvalidArgument(f"the model directory {path} lacks weights: {', '.join(missing)}")
    elif not any(path.glob("*.safetensors")):
        raise InvalidArgument(f"the model directory {path} has no weights (*.safetensors)")
