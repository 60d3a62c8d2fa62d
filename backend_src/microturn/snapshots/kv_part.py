"""The KV in a snapshot: the last part of the file, with its own checksum.

So a session can be restored even if its KV is damaged or unusable: then the KV is recomputed. The snapshot's checksum
covers the header's description of the KV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from microturn.kv.image import PagePart
from microturn.kv.page_track import Track
from microturn.kv.state_track import StateTrack
from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import DTYPE_NAMES, checksum_of, tensor_entries

# Prefix of the KV tensors' names.
PREFIX = "kv."

_METADATA = "kv"
# The first axes of the elements are heads; whether tokens or panels follow, their shape tells.
_LAYOUT = "HND"
# Of files that name none: tokens came first.
_FIRST_LAYOUT = "NHD"


@dataclass(frozen=True)
class KVPart:
    """The header's description of a snapshot's KV.

    Attributes:
        layout: order of a page's axes.
        state: of the page table that the pages belong to.
        tensors: type and shape of each, in the order of `KVTensors.page_parts`.
        start: offset of the first tensor in the file.
        num_bytes: of all tensors.
        checksum: of these bytes; empty where they were not to be kept.
        num_before: pages of the table that come before these, and are elsewhere.
        scales: of its 8-bit floats (see `PagePart`).
    """

    layout: str
    state: TableState
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    start: int
    num_bytes: int
    checksum: str
    num_before: int = 0
    scales: str = ""

    @classmethod
    def of_header(cls, header: Mapping[str, Any], data_start: int) -> Self | None:
        """Reads the description from a header; returns None if the snapshot has no KV.

        Args:
            header: of the file.
            data_start: offset in the file from which the tensors' offsets count.

        Raises:
            ValueError, TypeError, LookupError: the header is not one of ours.
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
        layout = said.get("layout", _FIRST_LAYOUT)
        where = data_start + start, end - start
        more = said.get("num_before", 0), said.get("scales", "")
        return cls(layout, table_of(said["table"]), tensors, *where, said["checksum"], *more)

    def is_of(self, parts: Sequence[PagePart]) -> bool:
        """Whether it can be loaded into pages with these parts unchanged."""
        num_pages = self.state.num_pages - self.num_before
        expected = tuple((DTYPE_NAMES[part.dtype], (num_pages, *part.shape)) for part in parts)
        num_bytes = num_pages * sum(part.num_bytes for part in parts)
        has_form = (self.layout, self.tensors, self.num_bytes) == (_LAYOUT, expected, num_bytes)
        return has_form and self.scales == _scales_of(parts)


def _scales_of(parts: Sequence[PagePart]) -> str:
    """All parts tell the same."""
    return next((part.scales for part in parts), "")


def table_of(said: Mapping[str, Any]) -> TableState:
    """A table's state as `dataclasses.asdict` gives it, from JSON."""
    return TableState(**{**said, "tracks": tuple(map(_track_of, said["tracks"]))})


def _track_of(said: Mapping[str, Any]) -> Track | StateTrack:
    return StateTrack(**{**said, "older": tuple(said["older"])}) if "older" in said else Track(**said)


def add_to_header(header: dict[str, Any], kv: KVCopy, data_len: int, *, is_checked: bool = True) -> None:
    """Adds to a header what `KVPart.of_header` reads.

    Args:
        header: of the file.
        kv: the KV that will follow.
        data_len: bytes of the tensors before the KV.
        is_checked: with a checksum, which takes as long as to copy the pages several times.
    """
    entries = tensor_entries(kv.pages, PREFIX + "{}", data_len)
    said = {
        "layout": _LAYOUT,
        "table": asdict(kv.state),
        "num_tensors": len(entries),
        "checksum": checksum_of(kv.pages) if is_checked else "",
    }
    if kv.num_before:
        said["num_before"] = kv.num_before
    if scales := _scales_of(kv.pages.parts):
        said["scales"] = scales
    header["__metadata__"][_METADATA] = json.dumps(said)
    header.update(entries)
