"""Passes of fixed sizes captured as CUDA graphs: one call replaces hundreds of launches.

Enough sizes are captured in advance to make padding cheap: small steps are limited by reading weights and keys, which a
few more tokens do not change. Each size has its own input buffers; only page tables, positions and embeddings are
copied. The logits of all sizes lie in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.gpu.flashinfer_attention import MOST_BLOCKS, AttentionShape, FlashInferAttention
from microturn.model.gpu.layers import TorchLayers
from microturn.model.step_attention import Attention

# Above this number of tokens a step takes longer on the GPU than its launch on the host.
_MOST_TOKENS = 512
_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, _MOST_TOKENS)
# Sessions of a step with long rows.
_FEW, _MANY = 4, 64

# What a tile takes for a key, relatively. Estimated, not measured: on an H100 small tiles wait for keys, while the
# largest has 128 operations for each byte of them, some 400 TFLOP/s at the memory's speed, which the kernel lacks.
_COSTS = {16: 2, 64: 2, 128: 3}


@dataclass(frozen=True, order=True)
class StepSize:
    """The size of a captured pass.

    A block of FlashInfer's kernel takes a tile of query vectors, of each token one for every query head of a key head.
    A captured pass has one tile for all rows, by the longest row that a plan of so many tokens and rows could have
    (`PrefillSplitQOKVIndptr` in FlashInfer's scheduler.cuh). More planned rows than there are sessions make the tile
    smaller; those have no queries.

    Attributes:
        num_tokens: new tokens of all rows.
        num_rows: sessions.
        num_planned: rows that attention is planned for, at least those of sessions.
    """

    num_tokens: int
    num_rows: int
    num_planned: int

    def tile(self, group_size: int, head_dim: int) -> int:
        """The tile that FlashInfer chooses (`FA2DetermineCtaTileQ` in its utils.cuh) for such heads."""
        longest = (self.num_tokens - self.num_planned + 1) * group_size
        if longest <= 16:
            return 16
        return 64 if longest <= 64 or head_dim >= 256 else 128

    def partial_bytes(self, shape: AttentionShape) -> int:
        """Bytes of the workspace for results of split keys: a float32 for each vector of a tile, and its weight."""
        return max(self._partial_bytes(shape.num_heads, *heads) for heads in shape.heads)

    def _partial_bytes(self, num_heads: int, group_size: int, head_dim: int) -> int:
        tile = self.tile(group_size, head_dim)
        num_tiles = -(-self.num_tokens * group_size // tile) + self.num_planned - 1
        num_split = MOST_BLOCKS // (num_heads // group_size)
        return num_heads * max(num_tiles, num_split) * tile * (head_dim + 1) * 4

    def attention_cost(self, lengths: Mapping[int, int], shape: AttentionShape) -> int:
        """How long attention takes for rows with as many keys each, to compare sizes.

        Args:
            lengths: how many rows have so many tokens.
            shape: of the attention.
        """
        cost = 0
        for group_size, head_dim in shape.heads:
            tile = self.tile(group_size, head_dim)
            num_tiles = sum(-(-length * group_size // tile) * num_rows for length, num_rows in lengths.items())
            cost += num_tiles * _COSTS[tile]
        return cost


def step_sizes(max_rows: int, max_tokens: int, shape: AttentionShape) -> list[StepSize]:
    """Sizes for short rows, such as decode steps have, and for rows of some and of many tokens; the largest first.

    Args:
        max_rows: maximum running sessions.
        max_tokens: maximum tokens of a step.
        shape: of the attention.
    """
    most = min(max_tokens, _MOST_TOKENS)
    tokens = [*(n for n in _TOKENS if n < most), most]
    group_size = max(group_size for group_size, _ in shape.heads)
    sizes = {StepSize(n, min(n, max_rows), n) for n in tokens}
    for n in tokens:
        sizes |= {StepSize(n, rows, rows) for rows in (min(_FEW, max_rows), min(_MANY, max_rows)) if rows < n}
        # The fewest with which FlashInfer chooses a tile of 64.
        planned = n + 1 - max(1, 64 // group_size)
        if planned > _FEW:
            sizes.add(StepSize(n, min(_MANY, max_rows, planned), planned))
    return sorted((size for size in sizes if size.partial_bytes(shape) <= shape.workspace_bytes), reverse=True)


def best_size(sizes: Iterable[StepSize], batch: Batch, shape: AttentionShape) -> StepSize | None:
    """The size for a batch, if one holds it: of those with fewest tokens, where attention takes least.

    Of these that with the smallest tile, and of these that with the fewest logits.
    """
    lengths = Counter(batch.lengths.tolist())
    holding = [size for size in sizes if batch.num_tokens <= size.num_tokens and len(batch.rows) <= size.num_rows]
    fewest = min((size.num_tokens for size in holding), default=0)
    nearest = (size for size in holding if size.num_tokens == fewest)
    return min(
        nearest,
        key=lambda size: (size.attention_cost(lengths, shape), -size.num_planned, size.num_rows),
        default=None,
    )


class StepGraph:
    """One captured pass.

    Args:
        decoder: the layers.
        attention: with the size's planned rows and tokens.
        kv: the pages; the last one is for padding.
        size: see `StepSize`.
        hidden: [tokens, hidden], embeddings of any tokens of the size.
        logits: float32 [rows of the size or more, vocab_size], written by each replay.
        pool: memory pool that all graphs share.
    """

    def __init__(
        self,
        decoder: TorchLayers,
        attention: FlashInferAttention,
        kv: KVTensors,
        size: StepSize,
        hidden: Tensor,
        logits: Tensor,
        pool: Any,
    ) -> None:
        self._attention = attention
        device = kv.device
        self._hidden = hidden
        self._positions = torch.zeros(size.num_tokens, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(size.num_rows, dtype=torch.int64, device=device)
        self._logits = logits[: size.num_rows]
        attention.plan(padding_batch(kv, size.num_tokens, size.num_rows))
        self._run(decoder, attention)  # compile and allocate before the capture
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._run(decoder, attention)

    def _run(self, decoder: TorchLayers, attention: Attention) -> None:
        decoder(self._hidden, self._positions, self._wanted, attention, self._logits)

    def replay(self, batch: Batch, hidden: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Enqueues the pass for a batch that fits; arguments and result as those of a `TransformerLayers`.

        The logits are valid until the next replay of any size.
        """
        self._attention.plan(batch)
        self._hidden[: len(hidden)] = hidden
        self._positions[: len(positions)] = positions
        self._wanted[: len(wanted)] = wanted
        self._graph.replay()
        return self._logits[: len(wanted)]


def padding_batch(kv: KVTensors, num_tokens: int, num_rows: int) -> Batch:
    """A batch of so many tokens and sessions; all of its rows read and write the padding page."""
    nums_tokens: Sequence[int] = [num_tokens - num_rows + 1, *[1] * (num_rows - 1)]
    return Batch([_padding_row(kv, num) for num in nums_tokens])


def _padding_row(kv: KVTensors, num_tokens: int) -> Row:
    num_pages = -(-num_tokens // kv.page_size)
    first, *others = (RowPages([kv.num_pages - 1] * (num_pages * kind.num_groups)) for kind in kv.groups.kinds)
    states = kv.new_state_pages(num_tokens, repeat(kv.num_pages - 1))
    return Row([0] * num_tokens, 0, first.pages, others=others, states=states)
