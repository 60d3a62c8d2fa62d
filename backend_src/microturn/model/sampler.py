"""Samples the next token: a pure function of logits, context, seed and absolute position, without state.

So a turn that is replayed, rewound, forked, preempted or moved to another worker continues identically, whatever the
batch. On a GPU all work is enqueued without synchronisation: no value of a tensor is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from microturn.kv.transfer import upload
from microturn.model import sampling_filters
from microturn.model.drawn import Drawn, Logprobs
from microturn.model.logits import add_biases, forbid_others
from microturn.model.sampling_columns import SamplingColumns, sampling_columns
from microturn.model.sampling_row import LIKELIEST, SamplingRow

# Bounds the GPU memory of sampling: some 60 bytes per logit of this many rows.
_AT_ONCE = 64


def draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Drawn:
    """Chooses a token for each row.

    Args:
        logits: float32 [rows, vocab_size].
        rows: as many.
    """
    # One by one on a CPU: batching is no faster, and all rows would pay for the options of one.
    ids = choose(logits, rows, at_once=1 if logits.is_cpu else _AT_ONCE)
    return Drawn(ids, _logprobs(logits, ids, rows))


def choose(logits: Tensor, rows: Sequence[SamplingRow], *, at_once: int) -> Tensor:
    """The chosen ids, int64 [rows], where the logits lie.

    Args:
        logits: float32 [rows, vocab_size].
        rows: as many.
        at_once: how many rows are computed together; does not change the result.
    """
    changed = [at for at, row in enumerate(rows) if row is not LIKELIEST and not _takes_argmax(row)]
    if not changed:
        return _argmax(logits)
    ids = _argmax(logits) if len(changed) < len(rows) else logits.new_empty(len(rows), dtype=torch.int64)
    columns = sampling_columns([rows[at] for at in changed], logits.shape[-1], logits.device)
    for first in range(0, len(changed), at_once):
        group = changed[first : first + at_once]
        places = _sent(group, logits.device)
        # Passes over memory count on a GPU: rows that are all meant are not gathered before they are changed.
        given = logits if len(group) == len(rows) else logits.index_select(0, places)
        chosen = _choose(given, [rows[at] for at in group], columns.of_rows(first, first + at_once))
        ids.index_copy_(0, places, chosen)
    return ids


def _argmax(logits: Tensor) -> Tensor:
    # NumPy's argmax is vectorized and torch's is not: 0.1 instead of 0.6 ms for 16 rows of 49,152.
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)


def _takes_argmax(row: SamplingRow) -> bool:
    options = row.options
    is_plain = not row.banned_ids and not options.has_penalties and not options.logit_bias and row.allowed is None
    return options.temperature == 0 and is_plain


def _logprobs(logits: Tensor, ids: Tensor, rows: Sequence[SamplingRow]) -> Logprobs | None:
    """Log probabilities for the rows that ask for them; None where no row does."""
    wanting = [at for at, row in enumerate(rows) if row.options.logprobs]
    if not wanting:
        return None
    places = _sent(wanting, logits.device)
    logprobs = logits.index_select(0, places).log_softmax(-1)
    chosen = logprobs.gather(-1, ids.index_select(0, places).unsqueeze(-1)).squeeze(-1)
    num_top = [rows[at].options.num_top_logprobs for at in wanting]
    if not any(num_top):
        return Logprobs(wanting, chosen, num_top)
    # Each row by itself: of equally likely tokens, those that are chosen depend on how many there are to be.
    tops = [of_row.topk(min(num, len(of_row))) for of_row, num in zip(logprobs, num_top, strict=True)]
    top_ids = pad_sequence([top.indices for top in tops], batch_first=True)
    return Logprobs(wanting, chosen, num_top, top_ids, pad_sequence([top.values for top in tops], batch_first=True))


def _sent(values: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    return upload(torch.as_tensor(values, dtype=torch.int64), device)


# ---- rows that are not greedy --------------------------------------------------------------------------------------


def _choose(logits: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> Tensor:
    """Ids [rows]. Does not change the logits."""
    has_penalties = any(row.options.has_penalties for row in rows)
    has_biases = any(row.options.logit_bias for row in rows)
    if has_penalties or has_biases:
        logits = logits.clone()
    if has_penalties:
        _penalize(logits, rows, columns)
    if has_biases:
        add_biases(logits, [row.options.logit_bias for row in rows])
    # Extreme penalties, or embeddings, produce infinities and NaN. That must affect this row only: without a token to
    # choose, an exception would end all turns in the step.
    logits = logits.nan_to_num()
    if any(row.banned_ids for row in rows):
        banned = _cells([row.banned_ids for row in rows], logits)
        logits.view(-1).index_fill_(0, banned, torch.finfo(logits.dtype).min)
    if any(row.allowed is not None for row in rows):
        forbid_others(logits, [row.allowed for row in rows])
    likeliest = _argmax(logits).unsqueeze(-1)
    if all(row.options.temperature == 0 for row in rows):
        return likeliest.squeeze(-1)
    drawn = _draw_filtered(logits, logits.gather(-1, likeliest), rows, columns)
    return torch.where(columns.temperature > 0, drawn, likeliest).squeeze(-1)


def _draw_filtered(logits: Tensor, greatest: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> Tensor:
    if not logits.is_cuda:
        return sampling_filters.draw_filtered(logits, greatest, rows, columns)
    from microturn.model.gpu import sampling  # needs Triton, which only torch for a GPU brings along

    return sampling.draw_filtered(logits, greatest, rows, columns)


def _penalize(logits: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> None:
    """Penalties over the whole context: repetition after Keskar et al. (2019), the others as OpenAI defines them.

    The others leave `spared_ids` as they are.
    """
    cells, at, counts = _seen(rows, logits)
    repetition, frequency, presence = (
        column.float().squeeze(-1).index_select(0, at)
        for column in (columns.repetition_penalty, columns.frequency_penalty, columns.presence_penalty)
    )
    flat = logits.view(-1)
    seen = flat.index_select(0, cells)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat.index_copy_(0, cells, seen)
    spared = _cells([row.spared_ids for row in rows], logits)
    kept = flat.index_select(0, spared)
    flat.index_copy_(0, cells, seen - (frequency * counts + presence))
    flat.index_copy_(0, spared, kept)


def _seen(rows: Sequence[SamplingRow], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of each row's context: indices in the flattened logits, rows, and counts.

    A token in `seen` that is also in `unknown` occurs twice, each time with the same count.
    """
    vocab_size, device = logits.shape[-1], logits.device
    at, ids, counts = (_sent(part, device) for part in _known(rows, vocab_size))
    unknown = {number: row.unknown for number, row in enumerate(rows) if row.unknown is not None}
    if not unknown:
        return at * vocab_size + ids, at, counts
    behind = np.repeat(list(unknown), [len(of_row) for of_row in unknown.values()])
    at = torch.cat((at, _sent(behind, device)))
    cells = at * vocab_size + torch.cat((ids, *unknown.values()))
    counts = torch.cat((counts, torch.ones_like(at[len(counts) :])))
    return cells, at, counts.new_zeros(logits.numel()).index_add_(0, cells, counts).index_select(0, cells)


def _known(rows: Sequence[SamplingRow], vocab_size: int) -> tuple[NDArray[np.int64], ...]:
    """The same for the tokens that the host knows: row, token, count; each int64 [n]."""
    of_rows = ((np.full(len(row.seen.ids), number), row.seen.ids, row.seen.counts) for number, row in enumerate(rows))
    at, ids, counts = (np.concatenate(parts) for parts in zip(*of_rows, strict=True))
    can_come = ids < vocab_size
    return (at, ids, counts) if can_come.all() else (at[can_come], ids[can_come], counts[can_come])


def _cells(ids: Sequence[Sequence[int] | NDArray[np.int64]], logits: Tensor) -> Tensor:
    """Indices of each row's ids in the flattened logits, int64 [ids of all rows]."""
    vocab_size = logits.shape[-1]
    of_rows = [np.asarray(of_row, np.int64) for of_row in ids]
    cells = [of_row[of_row < vocab_size] + row * vocab_size for row, of_row in enumerate(of_rows)]
    return _sent(np.concatenate(cells), logits.device)
