"""Writes a safetensors file tensor by tensor: memory holds one of them.

The format: eight bytes with the length of a JSON table, the table, and the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class TensorEntry(NamedTuple):
    """A line of the table; `dtype` is F32, F16 or BF16."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


def write_safetensors(path: Path, entries: Sequence[TensorEntry], contents: Iterable[memoryview]) -> None:
    """Writes a file.

    Args:
        path: of the new file.
        entries: of all tensors.
        contents: their bytes, in the same order, each taken when the one before is written.

    Errors:
        OSError: the file cannot be written.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for content in contents:
            file.write(content)
