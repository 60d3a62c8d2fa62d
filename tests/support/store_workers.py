"""What the tests of the model store run in other processes: importable without torch, so that they start fast."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

from microturn.errors import MicroturnError
from microturn.zoo.cache import prepare
from microturn.zoo.embedded_models import EmbeddedModel
from microturn.zoo.sources import EmbeddedSource
from microturn.zoo.store import resolve_model


def weights_inode(model: EmbeddedModel, cache_dir: Path) -> int:
    """Prepare the model; the same number means the same build."""
    return (prepare(EmbeddedSource(model), cache_dir) / "model.safetensors").stat().st_ino


def prepare_with_small_files(model: EmbeddedModel, cache_dir: Path, max_file_bytes: int) -> str:
    """Prepare the model in a process that the system lets write files of this size only; the error it ends with."""
    return _error_with_small_files(lambda: prepare(EmbeddedSource(model), cache_dir), max_file_bytes)


def resolve_with_small_files(model: str, max_file_bytes: int) -> str:
    """Resolve a model in a process that the system lets write files of this size only; the error it ends with."""
    return _error_with_small_files(lambda: resolve_model(model), max_file_bytes)


def _error_with_small_files(make: Callable[[], Path], max_file_bytes: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        make()
    except MicroturnError as error:
        return str(error)
    return ""
