"""Decides at load whether a model can be served: our logits against those of the stock model, in numbers.

Not every architecture survives a packed batch with a paged cache: some never call the attention interface, some scale
rotary angles by the longest position in the batch, some pass arguments that we do not implement. A list of names would
be wrong within a month, so each model shows it for itself, here. Our own layers (`FusedDecoder`) are held to the same
numbers: where they fail, transformers' layers are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.attention import paged
from microturn.batch import Batch, EmbedSpan, Row
from microturn.errors import InvalidArgument
from microturn.kv_tensors import KVTensors
from microturn.layer_groups import LayerShape
from microturn.layers.decoder import FusedDecoder
from microturn.layers.linear import ExactLinear, Linear
from microturn.runner import ModelRunner

log = logging.getLogger(__name__)

# Largest difference of logits that rounding explains, relative to the spread of the stock logits (float32).
TOLERANCE = 1e-3
_PAGE_SIZE = 16
# A sliding window longer than this is not walked through at load: it would take minutes on a large model.
_LONGEST_PROBE = 640
# Tokens that a window has lost, in whole pages: some hours of talk.
_FAR = 1_000_000 * _PAGE_SIZE


@dataclass(frozen=True)
class Checked:
    """How a model can be served.

    Attributes:
        decoder: the model's layers as ours, or None where they must be transformers' own.
        accepts_embeds: whether embeddings may stand for tokens.
        no_window_reason: why a session's window must not slide; None when it may.
    """

    decoder: FusedDecoder | None
    accepts_embeds: bool
    no_window_reason: str | None


def check_model(
    model: PreTrainedModel, layers: Sequence[LayerShape], *, use_native: bool, exact: bool = False
) -> Checked:
    """Compares splits, company near and far, and embeddings with the stock model.

    Args:
        model: loaded with our attention; it computes the same afterwards.
        layers: its layers' shapes.
        use_native: which kernels to check.
        exact: whether fused layers give a token the same bits in any company.

    Raises:
        InvalidArgument: when a session's logits would not be the stock model's.
    """
    name = type(model).__name__
    try:
        decoder = FusedDecoder.of(model, layers, ExactLinear if exact else Linear)
        if decoder is not None:
            return _check(model, layers, decoder, use_native=use_native, exact=exact)
    except Exception as reason:  # whatever does not fit our layers: transformers' own decide
        log.warning("%s runs on transformers' layers, which are slower than fused ones: %s", name, reason)
    try:
        return _check(model, layers, None, use_native=use_native)
    except _Deviation as reason:
        raise InvalidArgument(f"{name} cannot be served: its {reason}") from None


class _Deviation(Exception):
    """Logits are not the stock model's."""


def _check(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    decoder: FusedDecoder | None,
    *,
    use_native: bool,
    exact: bool = False,
) -> Checked:
    """What the model can do; raises `_Deviation` when tokens give other logits."""
    windows = [layer.window for layer in layers if layer.window is not None]
    length = max([96, *(window + 48 for window in windows if window + 48 <= _LONGEST_PROBE)])
    max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", length))
    length = min(length, max_positions)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
    neighbour = torch.randint(vocab_size, (length // 2,), generator=generator).tolist()

    num_pages = 2 * -(-length // _PAGE_SIZE)
    kv = KVTensors(layers, num_pages, _PAGE_SIZE)
    runner = ModelRunner(model, kv, use_native=use_native, decoder=decoder, exact=exact)
    pages, neighbour_pages = list(range(0, num_pages, 2)), list(range(1, num_pages, 2))
    cuts = sorted({1, 5, 21, length - 40, length - 1, length})
    got, got_neighbour = [], []
    for first, last in zip([0, *cuts], cuts, strict=False):
        rows = [Row(ids[first:last], first, pages)]
        if last <= len(neighbour):
            rows.append(Row(neighbour[first:last], first, neighbour_pages))
        logits = runner.run(Batch(rows))
        got.append(logits[0])
        if last <= len(neighbour):
            got_neighbour.append(logits[1])

    stock = stock_logits(model, ids)
    stock_neighbour = stock_logits(model, neighbour)
    name = type(model).__name__
    last_of = [cut - 1 for cut in cuts]
    _require_equal(name, "in several turns", torch.stack(got), stock[last_of])
    expected_neighbour = stock_neighbour[last_of[: len(got_neighbour)]]
    _require_equal(name, "beside another session", torch.stack(got_neighbour), expected_neighbour)

    # Rotary scaling that looks at the longest position in the batch shows beside a row at the far end of the context.
    far = Row([0], max_positions - 1, [neighbour_pages[0]] * -(-max_positions // _PAGE_SIZE))
    beside_far = runner.run(Batch([Row(ids[:32], 0, pages), far]))
    _require_equal(name, "beside a session at the end of its context", beside_far[0], stock[31])
    return Checked(
        decoder=decoder,
        accepts_embeds=_accepts_embeds(runner, ids[:32], pages, stock[31]),
        no_window_reason=_no_window_reason(runner, ids, pages, cuts, stock[last_of]),
    )


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits [n, vocab_size] of one full forward pass by transformers' own attention."""
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(paged.IMPLEMENTATION)
    return logits


def _deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())


def _require_equal(name: str, situation: str, got: Tensor, expected: Tensor) -> None:
    deviation = _deviation(got, expected)
    log.info("probe: logits of %s %s deviate by %.1e", name, situation, deviation)
    # Written so that NaN fails too.
    if not deviation <= TOLERANCE:
        raise _Deviation(
            f"logits {situation} deviate from the stock model's by {deviation:.1e} (allowed: {TOLERANCE:.0e})"
        )


def _accepts_embeds(runner: ModelRunner, ids: Sequence[int], pages: Sequence[int], expected: Tensor) -> bool:
    embeds = runner.model.get_input_embeddings()(torch.tensor(ids)).detach()
    try:
        got = runner.run(Batch([Row([0] * len(ids), 0, pages, [EmbedSpan(0, embeds)])]))
    except (ValueError, TypeError, NotImplementedError) as error:
        log.warning("input_embeds are refused: %s", error)
        return False
    return _deviation(got[0], expected) <= TOLERANCE


def _no_window_reason(
    runner: ModelRunner, ids: Sequence[int], pages: Sequence[int], cuts: Sequence[int], expected: Tensor
) -> str | None:
    """Tokens behind the sinks, however far, must have the logits of the places next to the sinks; None when they do."""
    runner.run(Batch([Row(ids[:_PAGE_SIZE], 0, pages)]))
    got = []
    firsts = [_PAGE_SIZE, *(cut for cut in cuts if cut > _PAGE_SIZE)]
    try:
        for first, last in pairwise(firsts):
            row = Row(ids[first:last], first + _FAR, pages, num_sinks=_PAGE_SIZE, num_evicted=_FAR)
            got.append(runner.run(Batch([row]))[0])
    except Exception as error:  # whatever a model does at positions that it has never seen
        return f"positions beyond its training fail: {error}"
    deviation = _deviation(torch.stack(got), expected[-len(got) :])
    log.info(
        "probe: logits of %s behind %d evicted tokens deviate by %.1e", type(runner.model).__name__, _FAR, deviation
    )
    if deviation <= TOLERANCE:
        return None
    return f"logits behind {_FAR} evicted tokens deviate from the stock model's by {deviation:.1e}"
