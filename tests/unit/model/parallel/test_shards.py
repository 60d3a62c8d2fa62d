"""What each rank has of a model."""

from __future__ import annotations

import copy

import pytest
import torch

from microturn.errors import InvalidArgument
from microturn.model.parallel.shards import Cut, cut, require_cuttable, span_of
from microturn.model.tracing import trace_layers
from support import models


@pytest.mark.parametrize(("width", "size"), [(8, 2), (7, 2), (2, 3), (49152, 3)])
def test_every_row_is_one_rank_s(width: int, size: int) -> None:
    spans = [span_of(width, rank, size) for rank in range(size)]
    assert [at for span in spans for at in span] == list(range(width))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize("name", ["grouped_heads", "biases", "own_fusion", "soft_caps"])
def test_the_parts_of_all_ranks_are_the_whole(name: str) -> None:
    model = getattr(models, name)()
    shapes = trace_layers(model)
    parts = [copy.deepcopy(model) for _ in range(2)]
    shards = [cut(part, shapes, rank, 2) for rank, part in enumerate(parts)]
    assert torch.equal(torch.cat([part.lm_head.weight for part in parts]), model.lm_head.weight)
    for shard in shards:
        assert shard.vocab_size == len(model.lm_head.weight)
        assert [2 * own.num_kv_heads for own in shard.shapes] == [shape.num_kv_heads for shape in shapes]
        assert sorted(shard.cuts.values(), key=str) == [Cut.INPUTS] * 2 * len(shapes) + [Cut.WORDS]
    for index, layer in enumerate(model.model.layers):
        of_ranks = [part.model.layers[index] for part in parts]
        down = torch.cat([of_rank.mlp.down_proj.weight for of_rank in of_ranks], 1)
        assert torch.equal(down, layer.mlp.down_proj.weight)
        x = torch.randn(3, layer.mlp.down_proj.out_features)
        whole = layer.mlp(x)
        assert torch.allclose(sum(of_rank.mlp(x) for of_rank in of_ranks), whole, atol=1e-5)


def test_a_bias_of_a_sum_is_added_by_one_rank_alone() -> None:
    model = models.biases()
    parts = [copy.deepcopy(model) for _ in range(2)]
    for rank, part in enumerate(parts):
        cut(part, trace_layers(model), rank, 2)
    attention = [part.model.layers[0].self_attn for part in parts]
    assert torch.equal(attention[0].o_proj.bias, model.model.layers[0].self_attn.o_proj.bias)
    assert attention[1].o_proj.bias is None
    assert len(attention[0].q_proj.bias) == len(attention[1].q_proj.bias) == 24


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("grouped_heads", 3, "its 2 key-value heads cannot be divided by that"),
        ("experts", 2, "it has experts"),
        ("norms_behind", 2, "its queries are normed over all heads"),
        ("layer_norms", 2, "its norm is a LayerNorm"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, size: int, reason: str) -> None:
    model = getattr(models, name)()
    message = f"setting 'tensor_parallel' cannot be {size} for {type(model).__name__}: {reason}"
    with pytest.raises(InvalidArgument, match=message):
        require_cuttable(model, trace_layers(model), size)
