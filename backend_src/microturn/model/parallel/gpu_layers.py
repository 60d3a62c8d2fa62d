"""The layers of a rank's share on a GPU."""

from __future__ import annotations

from transformers import PreTrainedModel

from microturn.model.gpu.glue import Glue
from microturn.model.gpu.layers import TorchLayers
from microturn.model.parallel.commands import Load
from microturn.model.parallel.products import ShardProducts
from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.shards import Shard
from microturn.model.products import TorchLinear


def layers_of(model: PreTrainedModel, shard: Shard, load: Load, ranks: Ranks) -> TorchLayers:
    """The layers over a model that has been cut, on this rank's GPU."""
    model.to(ranks.device)
    products = ShardProducts(TorchLinear, shard, ranks)
    glue = Glue.compiled() if load.compiled_glue else Glue()
    return TorchLayers(model, shard.shapes, glue, products, products.of(model.lm_head))
