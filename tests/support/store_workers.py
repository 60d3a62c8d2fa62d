"""What the tests of the model store run in other processes: importable without torch, so that they start fast."""

from __future__ import annotations

import resource
from pathlib import Path

from microturn.errors import MicroturnError
from microturn.zoo.embedded_models import EmbeddedModel
from microturn.zoo.store import prepare_embedded_model


def weights_inode(model: EmbeddedModel, cache_dir: Path) -> int:
    """Prepare the model; the same number means the same build."""
    return (prepare_embedded_model(model, cache_dir) / "model.safetensors").stat().st_ino


def prepare_with_small_files(model: EmbeddedModel, cache_dir: Path, max_file_bytes: int) -> str:
    """Prepare the model in a process that the system lets write files of this size only; the error it ends with."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        prepare_embedded_model(model, cache_dir)
    except MicroturnError as error:
        return str(error)
    return ""
