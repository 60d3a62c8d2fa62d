"""The layers of a rank's share on a CPU."""

from __future__ import annotations

from transformers import PreTrainedModel

from microturn.model.cpu import stored_model
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import release_linears
from microturn.model.parallel.commands import Load
from microturn.model.parallel.products import ShardProducts
from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.shards import Shard


def layers_of(model: PreTrainedModel, shard: Shard, load: Load, ranks: Ranks) -> FusedLayers:
    """The layers over a model that has been cut; its weights stay in memory where they are shared."""
    if load.weights != "int8":
        stored_model.make_resident(model)
        return FusedLayers(model, shard.shapes, ShardProducts(Linear, shard, ranks))
    layers = FusedLayers(model, shard.shapes, ShardProducts(Int8Linear, shard, ranks))
    release_linears(model)
    stored_model.make_resident(model)
    return layers
