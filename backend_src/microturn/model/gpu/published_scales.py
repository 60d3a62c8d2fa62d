"""The scales of 8-bit floats that came with a checkpoint (see `model_files.SCALES_FILE`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from microturn.errors import InvalidArgument
from microturn.zoo.model_files import SCALES_FILE


@dataclass(frozen=True)
class PublishedScales:
    """Scales by the names of tensors; none where a checkpoint had no 8-bit floats.

    Attributes:
        weights: by the names of modules, float32 [out, blocks of inputs].
        kv: of keys, and of values, by the names of attention modules.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    kv: tuple[Mapping[str, float], Mapping[str, float]] = field(default_factory=lambda: ({}, {}))

    @classmethod
    def read(cls, model_dir: str | Path) -> Self:
        """Those beside a model's weights.

        Raises:
            InvalidArgument: the file is damaged.
        """
        path = Path(model_dir) / SCALES_FILE
        if not model_dir or not path.exists():
            return cls()
        try:
            scales = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InvalidArgument(f"the scales in {path} cannot be read: {error}") from error
        keys, values = (
            {name: float(scale) for name, scale in _of(scales, ending).items()} for ending in (".k_scale", ".v_scale")
        )
        return cls(_of(scales, ".weight_scale"), (keys, values))

    def of_modules(self, model: nn.Module) -> dict[nn.Module, Tensor]:
        """The scales of a model's weights, by its modules."""
        return {module: self.weights[name] for name, module in model.named_modules() if name in self.weights}


def _of(scales: dict[str, Tensor], ending: str) -> dict[str, Tensor]:
    return {name.removesuffix(ending): scale for name, scale in scales.items() if name.endswith(ending)}
