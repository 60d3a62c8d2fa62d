"""Tests of snapshots.kv_part: whose pages can take a snapshot's KV up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from microturn.kv.layer_groups import LayerShape
from microturn.kv.quantization import UNSCALED, LayerScales
from microturn.kv.table_state import TableState
from microturn.kv.tensors import KVTensors
from microturn.offload.copies import KVCopy
from microturn.snapshots.kv_part import KVPart, add_to_header
from support.tiers import make_kv

STATE = TableState(page_size=4, kv_len=10)


def part_of(kv: KVTensors, data_len: int = 64) -> KVPart:
    header: dict[str, Any] = {"__metadata__": {}}
    add_to_header(header, KVCopy(STATE, kv.read([1, 5, 2])), data_len)
    part = KVPart.of_header(header, 1000)
    assert part is not None
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_pages_of_the_same_layout_and_type_can(dtype: torch.dtype) -> None:
    kv = make_kv(8, dtype=dtype)
    part = part_of(kv)
    assert part.is_of(kv.page_parts)
    assert (part.state, part.start, part.num_bytes) == (STATE, 1064, 3 * kv.bytes_per_page)


@pytest.mark.parametrize(
    "other",
    [
        make_kv(8, dtype=torch.bfloat16),
        make_kv(8, dtype=torch.int8),
        make_kv(8, page_size=8),
        KVTensors([LayerShape(2, 3)], 8, 4),
        KVTensors([LayerShape(3, 2), LayerShape(1, 5)], 8, 4),
    ],
)
def test_pages_of_another_layout_or_type_cannot(other: KVTensors) -> None:
    assert not part_of(make_kv(8)).is_of(other.page_parts)
    assert part_of(other).is_of(other.page_parts)


def with_scales(*of_layers: LayerScales) -> KVTensors:
    layers = [LayerShape(3, 2), LayerShape(1, 4)]
    return KVTensors(layers, 8, 4, torch.float8_e4m3fn, float8=of_layers or None)


def test_pages_of_other_scales_cannot() -> None:
    kinds = [with_scales(), with_scales(LayerScales(2.0, 1.0), UNSCALED), with_scales(UNSCALED, LayerScales(2.0, 1.0))]
    for saved in kinds:
        assert [part_of(saved).is_of(here.page_parts) for here in kinds] == [saved is here for here in kinds]
    assert part_of(kinds[0]).is_of(with_scales(UNSCALED, UNSCALED).page_parts)


def test_pages_of_an_earlier_order_cannot_though_their_shape_is_the_same() -> None:
    """Those of a model with as many heads as tokens in a page: they were read as if they were of today's order."""
    kv = KVTensors([LayerShape(4, 2)], 8, 4)
    header: dict[str, Any] = {"__metadata__": {}}
    add_to_header(header, KVCopy(STATE, kv.read([1, 5, 2])), 0)
    said = json.loads(header["__metadata__"]["kv"])
    del said["layout"]
    header["__metadata__"]["kv"] = json.dumps(said)
    part = KVPart.of_header(header, 0)
    assert part is not None
    assert not part.is_of(kv.page_parts)


@pytest.mark.parametrize("offsets", [[1.5, 2], [-8, 8], [80, 64], ["a", "b"], [64]])
def test_a_header_that_nobody_wrote_is_refused(offsets: list[Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {}}
    add_to_header(header, KVCopy(STATE, make_kv(8).read([1, 5, 2])), 0)
    for name in list(header)[1:]:
        header[name] = {**header[name], "data_offsets": offsets}
    with pytest.raises((ValueError, TypeError, LookupError)):
        KVPart.of_header(header, 0)
