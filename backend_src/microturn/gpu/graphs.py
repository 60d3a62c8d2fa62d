"""Passes of a fixed size captured as CUDA graphs: one call replays what would be hundreds of launches.

Sizes are captured in advance, as many as make padding cheap: what small steps take is reading weights and keys, and
that is the same for a few tokens more. Every size reads its inputs from memory of its own; between two steps nothing is
copied but page tables, positions and embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microturn.batch import Batch, Row, RowPages
from microturn.gpu.flashinfer_attention import FlashInferAttention
from microturn.kv_tensors import KVTensors
from microturn.layers.decoder import Attention
from microturn.runner import Decoder

# Beyond so many tokens a step takes the GPU longer than launching it takes the host.
_MOST_TOKENS = 256
_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, _MOST_TOKENS)
_MIXED_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True, order=True)
class StepSize:
    """What a captured pass has room for.

    Attributes:
        num_tokens: new tokens of all rows.
        num_rows: sessions.
    """

    num_tokens: int
    num_rows: int

    @property
    def is_decode(self) -> bool:
        """Whether every session has one new token when it is full."""
        return self.num_tokens == self.num_rows

    def holds(self, batch: Batch) -> bool:
        """Whether a batch fits."""
        return len(batch.rows) <= self.num_rows and batch.num_tokens <= self.num_tokens


def step_sizes(max_rows: int, max_tokens: int) -> list[StepSize]:
    """Sizes for decode steps, a token for each session, and for steps with appends; the largest first.

    Args:
        max_rows: sessions that may run at once.
        max_tokens: that a step computes at most.
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
        attention: of as many rows and tokens as the size has.
        kv: the pages; the last one is for padding.
        size: see `StepSize`.
        hidden: [tokens, hidden], embeddings of any tokens, as many as the size has.
        pool: of memory that all graphs share.
    """

    def __init__(
        self,
        decoder: Decoder,
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
        self._run(decoder, attention)  # what is compiled or allocated once is so before the capture
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = self._run(decoder, attention)

    def _run(self, decoder: Decoder, attention: Attention) -> Tensor:
        return decoder(self._hidden, self._positions, self._wanted, attention)

    def replay(self, batch: Batch, hidden: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Enqueues the pass for a batch that fits; arguments and result as those of a `Decoder`.

        The logits are good until the next replay.
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
    return Row([0] * num_tokens, 0, first.pages, others=others)
