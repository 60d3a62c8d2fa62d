"""Converts a Hugging Face directory with quantized weights to one with plain weights, tensor by tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from microturn.errors import InvalidArgument
from microturn.zoo.dequantization import IGNORED, Stored, find_format
from microturn.zoo.model_files import TORCH_DTYPES, stored_tensors, write_model
from microturn.zoo.safetensors_file import TensorEntry

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QuantizedCheckpoint:
    """A model directory whose config has a `quantization_config`.

    Errors:
        InvalidArgument: an unknown quantization, or tensors that do not fit it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = json.loads((directory / "config.json").read_bytes())
        self._format = find_format(self._config["quantization_config"])
        text_config = self._config.get("text_config") or {}
        named = [config.get(key) for config in (self._config, text_config) for key in ("dtype", "torch_dtype")]
        self._dtype = _DTYPES[next((name for name in named if name in _DTYPES), "float32")]
        try:
            with ExitStack() as files:
                self._weights = list(self._plan(stored_tensors(directory, files)))
        except (SafetensorError, KeyError, ValueError) as error:
            raise InvalidArgument(f"the quantized weights in {directory} cannot be read: {error!r}") from error

    @property
    def converted_bytes(self) -> int:
        """Disk space of the converted directory, without its small files."""
        return sum(entry.num_bytes for entry, _ in self._weights)

    def convert(self, model_dir: Path, *, label: str) -> None:
        """Creates a directory with plain weights in the type that the config names, and all files but the weights.

        Args:
            model_dir: does not exist yet. After an error it may be incomplete.
            label: of the model in the progress bar.

        Errors:
            OSError: the directory cannot be written.
        """
        plain = {key: value for key, value in self._config.items() if key != "quantization_config"}
        label = f"{label}: dequantizing"
        write_model(self._directory, model_dir, plain, self._weights, self._values, label=label)

    def _plan(self, stored: Mapping[str, Stored]) -> Iterator[tuple[TensorEntry, dict[str, str]]]:
        """Each tensor to write, with the tensors that it is made of, by their parts; one without parts is copied."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in stored:
            module, _, part = name.rpartition(".")
            if part not in IGNORED:
                modules[module][part] = name
        for module, parts in modules.items():
            quantized = {}
            if not self._format.markers.isdisjoint(parts):
                quantized = {part: name for part, name in parts.items() if part in self._format.parts}
                shape = self._format.shape({part: stored[name] for part, name in quantized.items()})
                yield TensorEntry(f"{module}.weight", self._dtype, shape), quantized
            for part, name in parts.items():
                if part not in quantized:
                    dtype = stored[name].get_dtype()
                    if dtype not in TORCH_DTYPES:
                        raise ValueError(f"{name} is of the type {dtype}, and nothing says what that means")
                    yield TensorEntry(name, dtype, stored[name].get_shape()), {"": name}

    def _values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""] if "" in parts else self._format.values(parts)
