"""Passes of fixed sizes captured as CUDA graphs: one call replaces hundreds of launches.

Enough sizes are captured in advance to make padding cheap: small steps are limited by reading weights and keys, which a
few more tokens do not change. Each size has its own input buffers; only page tables, positions and embeddings are
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.cpu.layers import Attention
from microturn.model.gpu.flashinfer_attention import FlashInferAttention
from microturn.model.runner import TransformerLayers

# Above this number of tokens a step takes longer on the GPU than its launch on the host.
_MOST_TOKENS = 256
_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, _MOST_TOKENS)
_MIXED_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True, order=True)
class StepSize:
    """The size of a captured pass.

    Attributes:
        num_tokens: new tokens of all rows.
        num_rows: sessions.
    """

    num_tokens: int
    num_rows: int

    @property
    def is_decode(self) -> bool:
        """Whether each session has one new token when the pass is full."""
        return self.num_tokens == self.num_rows

    def holds(self, batch: Batch) -> bool:
        """Whether a batch fits."""
        return len(batch.rows) <= self.num_rows and batch.num_tokens <= self.num_tokens


def step_sizes(max_rows: int, max_tokens: int) -> list[StepSize]:
    """Sizes for decode steps, a token for each session, and for steps with appends; the largest first.

    Args:
        max_rows: maximum running sessions.
        max_tokens: maximum tokens of a step.
    """
    most = min(max_tokens, _MOST_TOKENS)
    tokens = [*(n for n in _TOKENS if n < most), most]
    decode = {StepSize(n, n) for n in tokens if n <= max_rows} | {StepSize(most, min(most, max_rows))}
    mixed = {StepSize(n, rows) for n in tokens for rows in _MIXED_ROWS if rows < n and rows <= max_rows}
    return sorted(decode | mixed, reverse=True)


class StepGraph:
    """One captured pass.

    Args:
        decoder: the layers.
        attention: with the size's rows and tokens.
        kv: the pages; the last one is for padding.
        size: see `StepSize`.
        hidden: [tokens, hidden], embeddings of any tokens of the size.
        pool: memory pool that all graphs share.
    """

    def __init__(
        self,
        decoder: TransformerLayers,
        attention: FlashInferAttention,
        kv: KVTensors,
        size: StepSize,
        hidden: Tensor,
        pool: Any,
    ) -> None:
        self._attention = attention
        device = kv.device
        self._hidden = hidden
        self._positions = torch.zeros(size.num_tokens, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(size.num_rows, dtype=torch.int64, device=device)
        attention.plan(padding_batch(kv, size))
        self._run(decoder, attention)  # compile and allocate before the capture
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = self._run(decoder, attention)

    def _run(self, decoder: TransformerLayers, attention: Attention) -> Tensor:
        return decoder(self._hidden, self._positions, self._wanted, attention)

    def replay(self, batch: Batch, hidden: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Enqueues the pass for a batch that fits; arguments and result as those of a `TransformerLayers`.

        The logits are valid until the next replay.
        """
        self._attention.plan(batch)
        self._hidden[: len(hidden)] = hidden
        self._positions[: len(positions)] = positions
        self._wanted[: len(wanted)] = wanted
        self._graph.replay()
        return self._logits[: len(wanted)]


def padding_batch(kv: KVTensors, size: StepSize) -> Batch:
    """A batch that fills a size; all of its rows read and write the padding page."""
    longest = size.num_tokens - size.num_rows + 1
    nums_tokens: Sequence[int] = [longest, *[1] * (size.num_rows - 1)]
    return Batch([_padding_row(kv, num_tokens) for num_tokens in nums_tokens])


def _padding_row(kv: KVTensors, num_tokens: int) -> Row:
    num_pages = -(-num_tokens // kv.page_size)
    first, *others = (RowPages([kv.num_pages - 1] * (num_pages * kind.num_groups)) for kind in kv.groups.kinds)
    states = kv.new_state_pages(num_tokens, repeat(kv.num_pages - 1))
    return Row([0] * num_tokens, 0, first.pages, others=others, states=states)
