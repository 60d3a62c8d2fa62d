"""Converts a Hugging Face directory with quantized weights to one with plain weights, tensor by tensor.

The scales of 8-bit floats come along in a file of their own: divided by these, the plain weights are the numbers of the
checkpoint again, exactly, and so are keys and values (see `model_files.SCALES_FILE`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError

from microturn.errors import InvalidArgument
from microturn.zoo import float8_formats
from microturn.zoo.dequantization import IGNORED, find_format
from microturn.zoo.kv_scales import kv_scales
from microturn.zoo.model_files import TORCH_DTYPES, PlainTensor, copied, stored_tensors, write_model
from microturn.zoo.quantization_config import read_quantization
from microturn.zoo.quantized_format import Stored
from microturn.zoo.safetensors_file import TensorEntry

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QuantizedCheckpoint:
    """A model directory with quantized weights (see `read_quantization`).

    Errors:
        InvalidArgument: an unknown quantization, or tensors that do not fit it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = json.loads((directory / "config.json").read_bytes())
        self._format = find_format(read_quantization(directory, self._config) or {})
        text_config = self._config.get("text_config") or {}
        named = [config.get(key) for config in (self._config, text_config) for key in ("dtype", "torch_dtype")]
        self._dtype = _DTYPES[next((name for name in named if name in _DTYPES), "float32")]
        try:
            with ExitStack() as files:
                self._tensors = list(self._plan(stored_tensors(directory, files)))
        except (SafetensorError, KeyError, ValueError) as error:
            raise InvalidArgument(f"the quantized weights in {directory} cannot be read: {error!r}") from error

    @property
    def converted_bytes(self) -> int:
        """Disk space of the converted directory, without its small files."""
        return sum(tensor.entry.num_bytes for tensor in self._tensors)

    def convert(self, model_dir: Path, *, label: str) -> None:
        """Creates a directory with plain weights in the type that the config names, and all files but the weights.

        Args:
            model_dir: does not exist yet. After an error it may be incomplete.
            label: of the model in the progress bar.

        Errors:
            OSError: the directory cannot be written.
        """
        plain = {key: value for key, value in self._config.items() if key != "quantization_config"}
        write_model(self._directory, model_dir, plain, self._tensors, label=f"{label}: dequantizing")

    def _plan(self, stored: Mapping[str, Stored]) -> Iterator[PlainTensor]:
        """Each tensor to write, with the tensors that it is made of."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in stored:
            module, _, part = name.rpartition(".")
            if part not in IGNORED:
                modules[module][part] = name
        for module, parts in modules.items():
            quantized = {}
            if not self._format.markers.isdisjoint(parts):
                quantized = {part: name for part, name in parts.items() if part in self._format.parts}
                yield from self._plan_weight(
                    module, quantized, {part: stored[name] for part, name in quantized.items()}
                )
            for part, name in parts.items():
                if part not in quantized:
                    dtype = stored[name].get_dtype()
                    if dtype not in TORCH_DTYPES:
                        raise ValueError(f"{name} is of the type {dtype}, and nothing says what that means")
                    yield copied(name, name, stored)
        for ours, theirs in kv_scales(stored).items():
            yield PlainTensor(TensorEntry(ours, "F32", []), {"": theirs}, lambda parts: parts[""])

    def _plan_weight(self, module: str, names: Mapping[str, str], parts: Mapping[str, Stored]) -> Iterator[PlainTensor]:
        """A quantized weight, and the scales of 8-bit floats."""
        yield PlainTensor(
            TensorEntry(f"{module}.weight", self._dtype, self._format.shape(parts)), names, self._format.values
        )
        block = self._format.block
        shape = float8_formats.row_scales_shape(parts, block)
        if shape is not None:
            entry = TensorEntry(f"{module}.weight_scale", "F32", shape)
            yield PlainTensor(entry, names, lambda read: float8_formats.row_scales(read, block))
