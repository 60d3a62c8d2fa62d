"""A file cache of the results of the checks at load, so that a restarted server does not repeat them.

A file's name is a digest of all that determines the results: the model's fingerprint and the times of its files, this
package's sources, the libraries that compute and how torch was built, the processor, and the settings and variables
that choose kernels. If any of them differs, the model is checked again. Refusals are not cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from microturn.model.fingerprint import model_fingerprint
from microturn.model.traits import Traits
from microturn.settings import Settings

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("torch", "transformers", "numpy", "numba", "llvmlite")
# Environment variables of these libraries select kernels.
_PREFIXES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "TORCH_")
_PROCESSOR = ("model name", "flags", "Features", "CPU part")


@dataclass(frozen=True)
class Outcome:
    """The result of the checks at load.

    Attributes:
        weights: type of the weights, ``int8`` or ``float32``.
        no_fused_reason: why transformers' own layers serve the model; None if ours do.
        no_int8_reason: why the weights are float32, where that was not set; None otherwise.
        accepts_embeds: whether embeddings may replace tokens.
        no_window_reason: why sessions cannot have a sliding window; None if they can.
        traits: of the model.
    """

    weights: str
    no_fused_reason: str | None
    no_int8_reason: str | None
    accepts_embeds: bool
    no_window_reason: str | None
    traits: Traits


class RememberedChecks:
    """The cached result for a model with given settings.

    Args:
        directory: of the cache; created when a result is written.
        settings: with which the model is loaded.
        no_native_reason: why native attention cannot be used for any model; None if it can.
        num_threads: of forward passes.

    Raises:
        OSError: the model cannot be read.
    """

    def __init__(self, directory: Path, settings: Settings, *, no_native_reason: str | None, num_threads: int) -> None:
        digest = hashlib.blake2b(digest_size=16)
        asked = (settings.weights, settings.attention, settings.page_size, no_native_reason, num_threads)
        files = sorted(
            (file.name, file.stat().st_mtime_ns) for file in Path(settings.model_dir).iterdir() if file.exists()
        )
        for part in (model_fingerprint(settings.model_dir), repr(files), repr(asked), *_machine()):
            digest.update(part.encode() + b"\0")
        for source in sorted(_PACKAGE.rglob("*.py")):
            digest.update(source.read_bytes() + b"\0")
        self._path = directory / f"{digest.hexdigest()}.json"

    def recall(self) -> Outcome | None:
        """The cached result; None if there is none."""
        try:
            read = json.loads(self._path.read_bytes())
            outcome = Outcome(**read | {"traits": Traits.from_json(read["traits"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the model is checked again: %s cannot be read: %s", self._path, error)
            return None
        log.info("the model was checked before, with the same libraries and processor: %s", self._path)
        return outcome

    def remember(self, outcome: Outcome) -> None:
        """Writes the result. If the file cannot be written, the next start checks again."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as directory:
                part = Path(directory, self._path.name)
                part.write_text(json.dumps(vars(outcome) | {"traits": outcome.traits.to_json()}))
                part.replace(self._path)
        except OSError as error:
            log.warning("the results of the checks at load are not cached: %s", error)


def _machine() -> list[str]:
    """Libraries, torch's build, processor, and environment variables that select kernels."""
    libraries = [f"{name} {_version(name)}" for name in _LIBRARIES] + [torch.__config__.show()]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    first_processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    return libraries + variables + [line for line in first_processor.splitlines() if line.startswith(_PROCESSOR)]


def _version(library: str) -> str:
    """The version of what is imported: metadata may be missing, or of another installation."""
    try:
        return str(import_module(library).__version__)
    except ImportError:
        return "not installed"
