"""The KV in a snapshot: the last thing in the file, with a checksum of its own.

So a session is there even where its KV is damaged or of no use: that costs the time to compute it again, and nothing
else. What the header says of it is covered by the checksum of all the rest. Knows no sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from microturn.kv_image import PagePart
from microturn.kv_tensors import LAYOUT
from microturn.page_table import TableState
from microturn.page_track import Track
from microturn.tiers.copies import KVCopy
from microturn.tiers.image_file import DTYPE_NAMES, checksum_of, tensor_entries

# Names of tensors that begin so are its.
PREFIX = "kv."

_METADATA = "kv"
# Of files that do not say.
_FIRST_LAYOUT = "NHD"


@dataclass(frozen=True)
class KVPart:
    """What a snapshot says of its KV.

    Attributes:
        layout: `kv_tensors.LAYOUT` when they were written.
        state: of the table whose pages these were.
        tensors: type and shape of each, in the order of `KVTensors.page_parts`.
        start: where the first of them begins in the file.
        num_bytes: what they take.
        checksum: of these bytes.
    """

    layout: str
    state: TableState
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    start: int
    num_bytes: int
    checksum: str

    @classmethod
    def of_header(cls, header: Mapping[str, Any], data_start: int) -> Self | None:
        """What a header says; None when the snapshot has no KV.

        Args:
            header: of the file.
            data_start: where in the file the offsets of the tensors are counted from.

        Raises:
            ValueError, TypeError, LookupError: it says nothing that we wrote.
        """
        if _METADATA not in header["__metadata__"]:
            return None
        said = json.loads(header["__metadata__"][_METADATA])
        entries = [header[f"{PREFIX}{number}"] for number in range(said["num_tensors"])]
        start = min(entry["data_offsets"][0] for entry in entries)
        end = max(entry["data_offsets"][1] for entry in entries)
        if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
            raise ValueError("KV in no place")
        tensors = tuple((entry["dtype"], tuple(entry["shape"])) for entry in entries)
        table = {**said["table"], "tracks": tuple(Track(**track) for track in said["table"]["tracks"])}
        layout = said.get("layout", _FIRST_LAYOUT)
        return cls(layout, TableState(**table), tensors, data_start + start, end - start, said["checksum"])

    def is_of(self, parts: Sequence[PagePart]) -> bool:
        """Whether pages that consist of these parts can take it up, bit by bit."""
        num_pages = self.state.num_pages
        expected = tuple((DTYPE_NAMES[part.dtype], (num_pages, *part.shape)) for part in parts)
        num_bytes = num_pages * sum(part.num_bytes for part in parts)
        return (self.layout, self.tensors, self.num_bytes) == (LAYOUT, expected, num_bytes)


def add_to_header(header: dict[str, Any], kv: KVCopy, data_len: int) -> None:
    """Adds what `KVPart.of_header` reads.

    Args:
        header: of the file.
        kv: what will stand at its end.
        data_len: bytes of the tensors before it.
    """
    entries = tensor_entries(kv.pages, PREFIX + "{}", data_len)
    said = {
        "layout": LAYOUT,
        "table": asdict(kv.state),
        "num_tensors": len(entries),
        "checksum": checksum_of(kv.pages),
    }
    header["__metadata__"][_METADATA] = json.dumps(said)
    header.update(entries)
