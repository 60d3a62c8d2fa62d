"""The products of a rank's share of a model, whose results the ranks put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.shards import Cut, Shard, span_of
from microturn.model.products import Product, Products


class SummedProduct:
    """A `Product` of which each rank has some of the inputs."""

    def __init__(self, part: Product, ranks: Ranks) -> None:
        self.num_out = part.num_out
        self.num_bytes = part.num_bytes
        self._part = part
        self._ranks = ranks

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`; the result is that of all ranks, at each of them."""
        return self._ranks.add(self._part(x, out))


class GatheredProduct:
    """A `Product` of which each rank computes some of the outputs.

    Args:
        part: this rank's.
        num_out: outputs of all.
    """

    def __init__(self, part: Product, num_out: int, ranks: Ranks) -> None:
        self.num_out = num_out
        self.num_bytes = part.num_bytes
        self._part = part
        self._ranks = ranks
        self._spans = [span_of(num_out, rank, ranks.size) for rank in range(ranks.size)]
        # All ranks send as much: the widest part.
        self._num_missing = max(map(len, self._spans)) - part.num_out

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`; rank 0 has the result, and others have arbitrary data."""
        part = self._part(x, x.new_empty(len(x), self._part.num_out))
        if self._num_missing:
            part = F.pad(part, (0, self._num_missing))
        for span, received in zip(self._spans, self._ranks.gather(part), strict=False):
            out[:, span.start : span.stop] = received[:, : len(span)]
        return out


class ShardProducts:
    """Creates the products of a shard; `Products` of a model that has been cut.

    Args:
        products: of one rank's weights.
        shard: what it has.
        ranks: all of them.
    """

    def __init__(self, products: Products, shard: Shard, ranks: Ranks) -> None:
        self._products = products
        self._shard = shard
        self._ranks = ranks

    def __call__(self, weight: Tensor, bias: Tensor | None, /) -> Product:
        raise NotImplementedError("weights of experts are not cut")

    def fused(self, modules: Sequence[nn.Linear], /) -> Product:
        """Of modules whose outputs the rank needs itself."""
        return self._products.fused(modules)

    def of(self, module: nn.Linear, /) -> Product:
        """Of a module whose outputs are those of all ranks."""
        part = self._products.of(module)
        if self._shard.cuts[module] is Cut.INPUTS:
            return SummedProduct(part, self._ranks)
        return GatheredProduct(part, self._shard.vocab_size, self._ranks)
