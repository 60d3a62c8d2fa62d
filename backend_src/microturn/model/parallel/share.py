"""One rank's share of a model, with the layers that compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from microturn.model.loaded import weight_bytes_of
from microturn.model.parallel.commands import Load
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.shards import Shard, cut
from microturn.model.runner import TransformerLayers


@dataclass(frozen=True)
class Share:
    """One rank's share.

    Attributes:
        model: cut; only its embeddings can be used.
        shard: what the rank has of it.
        decoder: its layers.
        load: how it was loaded.
        ranks: all of them.
        other_bytes: of the weights of other ranks, at rank 0.
    """

    model: PreTrainedModel
    shard: Shard
    decoder: TransformerLayers
    load: Load
    ranks: Ranks
    other_bytes: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, load: Load, ranks: Ranks) -> Self:
        """Cuts a model on a CPU, and moves this rank's part to its device.

        Args:
            model: that can be cut (see `require_cuttable`); its weights may be mapped from the file.
            load: how.
            ranks: all of them.
        """
        model.model.rotary_emb = load.rotary
        shard = cut(model, load.shapes, ranks.rank, ranks.size)
        if ranks.rank:  # rank 0 embeds
            whole = model.get_input_embeddings()
            model.set_input_embeddings(nn.Embedding(1, whole.embedding_dim, dtype=whole.weight.dtype))
        return cls(model, shard, _layers_of(model, shard, load, ranks), load, ranks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights in memory."""
        return weight_bytes_of(self.model, self.decoder, self.load.weights)

    @property
    def of_gpu_runner(self) -> dict[str, Any]:
        """Arguments of a `GpuRunner`."""
        return {"layers": self.shard.shapes, "scores": self.load.scores, "decoder": self.decoder}

    @classmethod
    def of_leader(cls, model: PreTrainedModel, load: Load, followers: Followers) -> Self:
        """Has all ranks load their shares, rank 0's out of a model that is loaded here."""
        with followers.doing(load) as ranks:
            share = cls.of(model, load, ranks)
            return replace(share, other_bytes=followers.wait())


def _layers_of(model: PreTrainedModel, shard: Shard, load: Load, ranks: Ranks) -> TransformerLayers:
    if load.for_gpu:
        from microturn.model.parallel import gpu_layers  # what only a GPU needs

        return gpu_layers.layers_of(model, shard, load, ranks)
    from microturn.model.parallel import cpu_layers  # what only a CPU needs: Numba

    return cpu_layers.layers_of(model, shard, load, ranks)
