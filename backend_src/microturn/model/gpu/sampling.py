"""Draws tokens on a GPU as `sampling_filters` and `sampler` do it in torch, to the bit, without a sort.

A filter needs the least probability that stays, not the order of all. It is found by a radix select (Alabi et al.,
2012) over the bits of the probabilities, which order as they do: the weights of all tokens are added up by their first
digit, the digit that has the border tells which tokens are added up by their second one, and so on. All sums are of
integers, so the order in which programs add to them changes nothing.

Nothing here depends on the number of rows: a kernel is compiled once for a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from microturn.model.sampling_columns import SamplingColumns
from microturn.model.sampling_filters import UNIT
from microturn.model.sampling_row import SamplingRow

# Tokens of a program, and its threads: 16 tokens of each.
_BLOCK = 4096
_NUM_WARPS = 8

# A key is how much greater the bits of a probability are than those of the greatest that weighs nothing: 0 to 2**29.
# Its digits, from the highest: how far it is shifted, and bits of the digit.
_DIGITS = ((19, 10), (9, 10), (0, 9))
_NUM_SUMS = tl.constexpr(1 << 10)
_NUM_BITS = tl.constexpr(29)
_NO_KEY = tl.constexpr(1 << 29)
_WEIGHTLESS_BITS = tl.constexpr(0x29800000 - 1)  # 2**-44 is 0x29800000

_UNIT = tl.constexpr(UNIT)
_NUM_COLUMNS = tl.constexpr(len(SamplingColumns._fields))
# Numbers of a row in a state: the least key that stays, as far as its digits are known, and what the tokens of higher
# digits count or weigh.
_NUM_STATES = tl.constexpr(2)

# Triton's interpreter, in which tests run on a CPU, has none of the device's library.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def draw_filtered(logits: Tensor, greatest: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> Tensor:
    """Ids, int64 [rows, 1], of a temperature above 0; of other rows anything. See `sampling_filters.draw_filtered`.

    Args:
        logits: float32 [rows, vocab_size], without NaN; overwritten.
        greatest: [rows, 1], the greatest of each row.
        rows: their options say which filters none of them wants.
        columns: of the rows.
    """
    logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    grid, sizes = (num_rows, num_blocks), {"vocab_size": vocab_size, "block_size": _BLOCK, "num_warps": _NUM_WARPS}
    _weigh[grid](logits, greatest, columns.temperature, **sizes)
    least = torch.zeros((num_rows, _NUM_STATES.value), dtype=torch.int64, device=logits.device)
    if any(0 < row.options.top_k < vocab_size for row in rows):
        least = _select(logits, columns.top_k, least, sizes, counts=True)
    if any(row.options.top_p < 1 for row in rows):
        least = torch.maximum(least, _select(logits, columns.top_p, least, sizes, counts=False))
    sums = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    _sum_blocks[grid](logits, least, columns.min_p, sums, **sizes)
    ids = torch.empty((num_rows, 1), dtype=torch.int64, device=logits.device)
    num_padded = triton.next_power_of_2(num_blocks)
    _find[(num_rows,)](logits, least, columns.min_p, columns.dice, sums, ids, **sizes, padded_blocks=num_padded)
    return ids


def _select(probs: Tensor, limits: Tensor, floor: Tensor, sizes: dict[str, int], *, counts: bool) -> Tensor:
    """The least key that stays: the likelier ones, of the floor or above, count or weigh less than a limit.

    Args:
        probs: [rows, vocab_size], relative to the likeliest token.
        limits: [rows, 1], a count, or a share of the weight of all; infinite is disabled, and the least key is 0.
        floor: a state, with the least keys that may stay.
        sizes: what all kernels are given.
        counts: whether tokens are counted, or weighed.

    Returns:
        A state, int64 [rows, 2].
    """
    num_rows, vocab_size = probs.shape
    state, enough = torch.zeros_like(floor), torch.empty(num_rows, dtype=torch.float64, device=probs.device)
    sums = torch.zeros((len(_DIGITS), num_rows, _NUM_SUMS.value), dtype=torch.int64, device=probs.device)
    for of_digit, (shift, bits) in zip(sums, _DIGITS, strict=True):
        digit = {"shift": shift, "bits": bits, "counts": counts}
        _add_up[num_rows, triton.cdiv(vocab_size, _BLOCK)](probs, limits, floor, state, of_digit, **digit, **sizes)
        _narrow[(num_rows,)](limits, state, enough, of_digit, **digit)
    return state


@triton.jit
def _weigh(
    logits: tl.tensor, greatest: tl.tensor, temperatures: tl.tensor, vocab_size: tl.constexpr, block_size: tl.constexpr
) -> None:
    """Makes logits probabilities, relative to the likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * block_size + tl.arange(0, block_size)
    temperature = tl.maximum(tl.load(temperatures + row * _NUM_COLUMNS), 1e-5).to(tl.float32)
    given = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    scaled = tl.div_rn(given - tl.load(greatest + row), temperature)
    # The exponential of torch's own kernels.
    relative = tl.exp(scaled) if _IS_INTERPRETED else libdevice.exp(scaled)
    tl.store(logits + row * vocab_size + ids, relative, mask=ids < vocab_size)


@triton.jit
def _key(probs: tl.tensor) -> tl.tensor:
    return tl.maximum(probs.to(tl.int32, bitcast=True) - _WEIGHTLESS_BITS, 0)


@triton.jit
def _weight(probs: tl.tensor) -> tl.tensor:
    return (probs * _UNIT).to(tl.int64)


@triton.jit
def _add_up(
    probs: tl.tensor,
    limits: tl.tensor,
    floor: tl.tensor,
    state: tl.tensor,
    sums: tl.tensor,
    shift: tl.constexpr,
    bits: tl.constexpr,
    counts: tl.constexpr,
    vocab_size: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    """Adds what a block's tokens count or weigh to the sums of their digit, of those tokens that may be the border."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * block_size + tl.arange(0, block_size)
    prob = tl.load(probs + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)
    key = _key(prob)
    higher_digits = tl.load(state + row * _NUM_STATES) >> (shift + bits)
    # Where the filter is disabled no key is great enough.
    is_enabled = tl.load(limits + row * _NUM_COLUMNS) < float("inf")
    lowest = tl.where(is_enabled, tl.load(floor + row * _NUM_STATES), _NO_KEY)
    is_wanted = (key > 0) & (key >= lowest) & (key >> (shift + bits) == higher_digits)
    digit = (key >> shift) & ((1 << bits) - 1)
    amount = tl.full((block_size,), 1, tl.int64) if counts else _weight(prob)
    tl.atomic_add(sums + row * _NUM_SUMS + digit, amount, mask=is_wanted, sem="relaxed")


@triton.jit
def _narrow(
    limits: tl.tensor,
    state: tl.tensor,
    enough: tl.tensor,
    sums: tl.tensor,
    shift: tl.constexpr,
    bits: tl.constexpr,
    counts: tl.constexpr,
) -> None:
    """Finds the lowest digit whose tokens stay: those of the digits above count or weigh less than is enough."""
    row = tl.program_id(0).to(tl.int64)
    digits = tl.arange(0, _NUM_SUMS)
    amounts = tl.load(sums + row * _NUM_SUMS + digits)
    total = tl.sum(amounts)
    limit = tl.load(limits + row * _NUM_COLUMNS)
    if shift + bits == _NUM_BITS:
        # Of a disabled filter nothing was added up, and infinitely many times nothing would be no number.
        limit = limit if counts else limit * tl.maximum(total, 1).to(tl.float64)
        tl.store(enough + row, limit)
    else:
        limit = tl.load(enough + row)
    least = tl.load(state + row * _NUM_STATES)
    before = tl.load(state + row * _NUM_STATES + 1) + total - tl.cumsum(amounts)
    digit = _NUM_SUMS - tl.sum((before.to(tl.float64) < limit).to(tl.int32))
    tl.store(state + row * _NUM_STATES, least + (digit.to(tl.int64) << shift))
    tl.store(state + row * _NUM_STATES + 1, tl.sum(tl.where(digits == digit, before, 0)))


@triton.jit
def _kept(
    probs: tl.tensor,
    least: tl.tensor,
    min_p: tl.tensor,
    row: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.constexpr,
) -> tl.tensor:
    """The weights of some tokens of a row, zero where a filter leaves them out."""
    prob = tl.load(probs + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)
    stays = _key(prob) >= tl.load(least + row * _NUM_STATES)
    stays &= prob >= tl.load(min_p + row * _NUM_COLUMNS).to(tl.float32)
    return tl.where(stays, _weight(prob), 0)


@triton.jit
def _sum_blocks(
    probs: tl.tensor,
    least: tl.tensor,
    min_p: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    """What each block of a row weighs, [rows, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weights = _kept(probs, least, min_p, row, block * block_size + tl.arange(0, block_size), vocab_size)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weights))


@triton.jit
def _find(
    probs: tl.tensor,
    least: tl.tensor,
    min_p: tl.tensor,
    dice: tl.tensor,
    sums: tl.tensor,
    found: tl.tensor,
    vocab_size: tl.constexpr,
    block_size: tl.constexpr,
    padded_blocks: tl.constexpr,
) -> None:
    """Inverse transform sampling: the first token up to which more than a random share of the weight lies."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, padded_blocks)
    num_blocks: tl.constexpr = (vocab_size + block_size - 1) // block_size
    of_blocks = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0)
    total = tl.sum(of_blocks)
    share = (tl.load(dice + row * _NUM_COLUMNS) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(share, total - 1)
    block = tl.sum((tl.cumsum(of_blocks) <= target).to(tl.int32))
    before = tl.sum(tl.where(blocks < block, of_blocks, 0))
    weights = _kept(probs, least, min_p, row, block * block_size + tl.arange(0, block_size), vocab_size)
    num_passed = tl.sum((before + tl.cumsum(weights) <= target).to(tl.int32))
    tl.store(found + row, (block * block_size + num_passed).to(tl.int64))
