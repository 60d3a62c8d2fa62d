"""One rank's share of a model, ready to compute: its layers and its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model.batch import Batch
from microturn.model.cpu import stored_model
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import release_linears
from microturn.model.parallel.commands import Allocate, Load, Pass
from microturn.model.parallel.copier import ParallelCopier
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.products import ShardProducts
from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.shards import Shard, cut
from microturn.model.runner import ModelRunner


@dataclass(frozen=True)
class Share:
    """One rank's share.

    Attributes:
        model: cut; only its embeddings can be used.
        shard: what the rank has of it.
        decoder: its layers.
        ranks: all of them.
    """

    model: PreTrainedModel
    shard: Shard
    decoder: FusedLayers
    ranks: Ranks

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Sequence[LayerShape], weights: str, ranks: Ranks) -> Self:
        """Cuts a model on a CPU.

        Args:
            model: that can be cut (see `require_cuttable`); its weights may be mapped from the file.
            shapes: KV shape of each layer of the whole model.
            weights: their type, ``int8`` or ``float32``.
            ranks: all of them.
        """
        shard = cut(model, shapes, ranks.rank, ranks.size)
        if weights == "int8":
            decoder = FusedLayers(model, shard.shapes, ShardProducts(Int8Linear, shard, ranks))
            release_linears(model)
        if ranks.rank:
            model.get_input_embeddings().to("meta")  # rank 0 embeds
        stored_model.make_resident(model)
        if weights != "int8":
            decoder = FusedLayers(model, shard.shapes, ShardProducts(Linear, shard, ranks))
        return cls(model, shard, decoder, ranks)

    @classmethod
    def of_leader(cls, model: PreTrainedModel, shapes: Sequence[LayerShape], load: Load, followers: Followers) -> Self:
        """Has all ranks load their shares, rank 0's out of a model that is loaded here."""
        with followers.doing(load) as ranks:
            share = cls.of(model, shapes, load.weights, ranks)
            followers.wait()
        return share


class LeadingRunner(ModelRunner):
    """Runs batches over the shares of all ranks.

    Args:
        share: rank 0's.
        followers: the other ranks.
        pages: to allocate, at all ranks.
        accepts_embeds: see `Runner`, and `no_window_reason` likewise.
    """

    decoder: FusedLayers

    def __init__(
        self,
        share: Share,
        followers: Followers,
        pages: Allocate,
        *,
        accepts_embeds: bool = True,
        no_window_reason: str | None = None,
    ) -> None:
        with followers.doing(pages):
            kv = pages.new_kv(share.shard.shapes, partial(ParallelCopier, followers=followers))
        super().__init__(
            share.model,
            kv,
            decoder=share.decoder,
            accepts_embeds=accepts_embeds,
            no_window_reason=no_window_reason,
        )
        self.vocab_size = share.shard.vocab_size
        self._followers = followers

    def _pass(self, batch: Batch, positions: Tensor, wanted: Tensor) -> Tensor:
        # What a batch can fail for comes first: the others have not been told of it yet.
        attention, embeds = self._attend(batch), self._embed(batch)
        with self._followers.doing(Pass.of(batch)) as ranks:
            return self.decoder(ranks.share(embeds), positions, wanted, attention)


class FollowingRunner(ModelRunner):
    """Runs the batches that rank 0 runs, over this rank's share; its logits are of no use.

    Args:
        share: this rank's.
        pages: to allocate.
    """

    def __init__(self, share: Share, pages: Allocate) -> None:
        super().__init__(share.model, pages.new_kv(share.shard.shapes), decoder=share.decoder)
        self._ranks = share.ranks

    def _embed(self, batch: Batch) -> Tensor:
        return self._ranks.share(torch.empty(batch.num_tokens, self.hidden_size))
