"""All layers in one call compute what they do one after another, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerGroups
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.cpu.arrays import LayerArrays, Unlike
from microturn.model.cpu.compiled import CompiledLayers
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import DecoderLayer
from microturn.model.rotary import Turning
from microturn.model.runner import ModelRunner
from microturn.model.tracing import trace_layers
from support import models

PAGE_SIZE, NUM_PAGES = 16, 8
MODELS = {
    "llama": models.llama,
    "grouped heads": models.grouped_heads,
    "biases": models.biases,
    "two windows": models.sliding_window,
    "soft caps": models.soft_caps,
    "norms of heads": partial(models.with_served_heads, "qwen3"),
    "norms behind blocks, two kinds of angles": partial(models.with_served_heads, "gemma3"),
    "neighbouring pairs": models.neighbouring_pairs,
    "no positions": models.no_positions,
    "own fusion, half heads": models.own_fusion,
    "neighbouring pairs in half heads": models.pairs_in_half_heads,
    "factors": models.factors,
    "norms behind blocks only": models.norms_behind,
    "positions in windows": models.positions_in_windows,
    "experts": models.experts,
    "a shared expert": models.shared_expert,
    "groups": partial(models.with_served_heads, "gemma3", num_hidden_layers=6),
}


def row(groups: LayerGroups, token_ids: Sequence[int], position: int, number: int, *, has_moved: bool = False) -> Row:
    """A row with pages of its own in each group, the other tokens of which were never written but are zeros."""
    moved = {"num_sinks": PAGE_SIZE, "num_evicted": 3 * PAGE_SIZE} if has_moved else {}
    first = number * groups.num_groups * NUM_PAGES
    of_kinds = []
    for kind in groups.kinds:
        num = kind.num_groups * NUM_PAGES
        # Only the layers that see furthest have sinks that moved: kinds have different numbers of moved queries.
        of_kinds.append(RowPages(list(range(first, first + num)), **(moved if not of_kinds else {})))
        first += num
    return Row(token_ids, position + moved.get("num_evicted", 0), of_kinds[0].pages, others=of_kinds[1:], **moved)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=["float32", "int8"])
@pytest.mark.parametrize("new_model", MODELS.values(), ids=MODELS.keys())
@torch.inference_mode()
def test_both_ways_give_the_same(new_model: Callable[[], PreTrainedModel], kv_dtype: torch.dtype) -> None:
    model = new_model()
    layers = trace_layers(model)
    groups = LayerGroups.of(layers)
    ids = torch.randint(models.VOCAB_SIZE, (49,), generator=torch.Generator().manual_seed(1)).tolist()
    batches = [
        [row(groups, ids[:40], 0, 0), row(groups, ids[40:], 0, 1)],
        [row(groups, [7], 40, 0), row(groups, [8], 9, 1)],
        [row(groups, ids[:9], 41, 0, has_moved=True), row(groups, [4], 10, 1)],
        [row(groups, [5], 50, 0, has_moved=True), row(groups, [6], 11, 1)],
    ]
    results: list[list[Tensor]] = []
    for is_compiled in (True, False):
        decoder = FusedLayers(model, layers, Int8Linear)
        assert decoder._compiled is not None
        if not is_compiled:
            decoder._compiled = None
        kv = KVTensors(
            layers, 2 * groups.num_groups * NUM_PAGES, PAGE_SIZE, kv_dtype, groups=groups, layout=PageLayout.PANELS
        )
        for pages in kv.layers:
            for tensor in pages.tensors:
                tensor.zero_()
        runner = ModelRunner(model, kv, decoder=decoder)
        results.append([runner.run(Batch(batch)).clone() for batch in batches])
    for got, expected in zip(*results, strict=True):
        # A last bit here or there, and then a step of an input that is rounded.
        assert float((got - expected).square().mean().sqrt() / expected.std()) < 0.05


@pytest.mark.parametrize("new_model", [models.soft_caps, models.pairs_in_half_heads, models.norms_behind])
@torch.inference_mode()
def test_a_session_has_the_same_bits_in_any_company_and_however_it_is_cut(
    new_model: Callable[[], PreTrainedModel],
) -> None:
    """With everything that rounds or caps at once, or turns a part of each head."""
    model = new_model()
    layers = trace_layers(model)
    groups = LayerGroups.of(layers)
    decoder = FusedLayers(model, layers, Int8Linear)
    assert decoder._compiled is not None
    kv = KVTensors(
        layers, 2 * groups.num_groups * NUM_PAGES, PAGE_SIZE, torch.int8, groups=groups, layout=PageLayout.PANELS
    )
    runner = ModelRunner(model, kv, decoder=decoder)
    ids, others = torch.randint(models.VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(2)).tolist()
    whole = runner.run(Batch([row(groups, ids, 0, 0)._replace(num_drafts=len(ids) - 1)])).clone()
    for cuts in ([1, 40, 41, 89], range(1, 90)):
        for first, last in pairwise([0, *cuts, 90]):
            rows = [row(groups, others[first:last], 0, 1), row(groups, ids[first:last], first, 0)]
            assert torch.equal(runner.run(Batch(rows))[1], whole[last - 1])


def known_layers(
    products: type[Linear] | type[Int8Linear] = Int8Linear, model: PreTrainedModel | None = None
) -> list[DecoderLayer]:
    model = models.llama() if model is None else model
    shapes = trace_layers(model)
    return [
        DecoderLayer.of(layer, shape, Turning(), products)
        for layer, shape in zip(model.model.layers, shapes, strict=True)
    ]


def test_only_8_bit_products_and_known_activations_are_compiled() -> None:
    layers = known_layers()
    assert CompiledLayers.of(layers) is not None
    assert CompiledLayers.of(known_layers(Linear)) is None
    (block,) = layers[-1].feed_forward.blocks
    other = replace(layers[-1].feed_forward, blocks=(replace(block, activation=nn.GELU()),))
    assert CompiledLayers.of([*layers[:-1], replace(layers[-1], feed_forward=other)]) is None


def test_layers_of_different_form_are_not_compiled() -> None:
    layers = known_layers()
    assert CompiledLayers.of([*layers[:-1], replace(layers[-1], attended_norm=layers[-1].input_norm)]) is None
    with_bias = known_layers(model=models.biases())
    assert CompiledLayers.of([layers[0], replace(layers[1], qkv=with_bias[1].qkv)]) is None
    with_cap = replace(layers[1], scores=replace(layers[1].scores, soft_cap=5.0))
    assert CompiledLayers.of([layers[0], with_cap]) is None


def test_arrays_of_layers_are_of_one_type_and_shape() -> None:
    first, second = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert LayerArrays.of([first, second]).addresses.tolist() == [first.ctypes.data, second.ctypes.data]
    for other in (second.astype(np.float64), second[:1]):
        with pytest.raises(Unlike):
            LayerArrays.of([first, other])


def test_layers_with_experts_and_without_are_not_compiled() -> None:
    assert CompiledLayers.of(known_layers(model=models.experts())) is not None
    assert CompiledLayers.of(known_layers(model=models.experts_in_some_layers())) is None


def test_experts_are_chosen_in_one_way_in_all_layers() -> None:
    layers = known_layers(model=models.experts())
    part = layers[-1].feed_forward
    assert part.router is not None
    other = replace(part, router=replace(part.router, num_chosen=3))
    assert CompiledLayers.of([*layers[:-1], replace(layers[-1], feed_forward=other)]) is None
