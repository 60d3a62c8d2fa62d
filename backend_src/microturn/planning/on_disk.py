"""What the files of a model say of it, before anything is loaded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from microturn.errors import InvalidArgument

# Types of tensors by their names in safetensors files.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8", "I32": "int32"}


@dataclass(frozen=True)
class OnDisk:
    """A model directory.

    Attributes:
        model: its name.
        architecture: class of the model, as its config names it.
        num_params: elements of all stored tensors.
        stored_dtype: type of most of them.
        stored_bytes: of all of them.
    """

    model: str
    architecture: str
    num_params: int
    stored_dtype: str
    stored_bytes: int

    @classmethod
    def of(cls, model: str, directory: Path) -> Self:
        """Reads the config and the headers of the weights' files.

        Args:
            model: its name.
            directory: of it, from `resolve_model`.

        Raises:
            InvalidArgument: a file is not what its name says.
        """
        counts = Counter[str]()
        num_bytes = 0
        for path in _files(directory):
            try:
                for tensor in _header(path).values():
                    counts[tensor["dtype"]] += prod(tensor["shape"])
                    num_bytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidArgument(f"{path} cannot be read as weights: {error!r}") from None
        dtype = max(counts, key=counts.__getitem__, default="no type")
        return cls(model, _architecture(directory), counts.total(), _DTYPES.get(dtype, dtype), num_bytes)


def _architecture(directory: Path) -> str:
    config = json.loads((directory / "config.json").read_bytes())
    names = config.get("architectures") if isinstance(config, dict) else None
    return str(names[0]) if isinstance(names, list) and names else "an architecture without a name"


def _files(directory: Path) -> list[Path]:
    """The files that transformers reads: there may be others, with the same weights in another form."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [single] if single.exists() else sorted(directory.glob("*.safetensors"))


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: type, shape and place of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
    header.pop("__metadata__", None)
    return header
