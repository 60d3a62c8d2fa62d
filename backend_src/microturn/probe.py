"""Decides at load whether a model can be served: our logits against those of the stock model, in numbers.

Not every architecture survives a packed batch with a paged cache: some never call the attention interface, some scale
rotary angles by the longest position in the batch, some pass arguments that we do not implement. A list of names would
be wrong within a month, so each model shows it for itself, here. Our own layers (`FusedDecoder`, `TorchDecoder`) are
held to the same numbers: where they fail, transformers' layers are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

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
from microturn.runner import Decoder, ModelRunner

log = logging.getLogger(__name__)

# Largest difference of logits that rounding explains, relative to the spread of the stock logits (float32).
TOLERANCE = 1e-3
_PAGE_SIZE = 16
# A sliding window longer than this is not walked through at load: it would take minutes on a large model.
_LONGEST_PROBE = 640
# Tokens that a window has lost, in whole pages: some hours of talk.
_FAR = 1_000_000 * _PAGE_SIZE


D = TypeVar("D", bound=Decoder)


@dataclass(frozen=True)
class Checked(Generic[D]):
    """How a model can be served.

    Attributes:
        decoder: the model's layers as ours, or None where they must be transformers' own.
        accepts_embeds: whether embeddings may stand for tokens.
        no_window_reason: why a session's window must not slide; None when it may.
    """

    decoder: D | None
    accepts_embeds: bool
    no_window_reason: str | None


def check_model(
    model: PreTrainedModel, layers: Sequence[LayerShape], *, use_native: bool, exact: bool = False
) -> Checked[FusedDecoder]:
    """Checks a model on a CPU, in float32: see `check_runner`.

    Args:
        model: loaded with our attention; it computes the same afterwards.
        layers: its layers' shapes.
        use_native: which kernels to check.
        exact: whether fused layers give a token the same bits in any company.

    Raises:
        InvalidArgument: when a session's logits would not be the stock model's.
    """
    new_decoder = partial(FusedDecoder.of, model, layers, ExactLinear if exact else Linear)
    return check_runner(
        type(model).__name__,
        lambda decoder: ModelRunner(
            model, new_pages(layers), use_native=use_native, decoder=decoder, exact=exact and decoder is not None
        ),
        new_decoder,
        TOLERANCE,
    )


def check_runner(
    name: str, new_runner: Callable[[D | None], ModelRunner], new_decoder: Callable[[], D | None], tolerance: float
) -> Checked[D]:
    """Compares splits, company near and far, and embeddings with the stock model.

    Args:
        name: of the model's class.
        new_runner: makes a runner with `new_pages` for layers of ours, or for transformers' own.
        new_decoder: makes layers of ours; None where we do not know the architecture.
        tolerance: what rounding explains, relative to the spread of the stock logits.

    Raises:
        InvalidArgument: when a session's logits would not be the stock model's.
    """
    try:
        decoder = new_decoder()
        if decoder is not None:
            return _check(new_runner(decoder), decoder, tolerance)
    except Exception as reason:  # whatever does not fit our layers: transformers' own decide
        log.warning("%s runs on transformers' layers, which are slower than fused ones: %s", name, reason)
    try:
        return _check(new_runner(None), None, tolerance)
    except _Deviation as reason:
        raise InvalidArgument(f"{name} cannot be served: its {reason}") from None


def new_pages(
    layers: Sequence[LayerShape], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> KVTensors:
    """Pages for two probes, and one for padding."""
    return KVTensors(layers, 2 * -(-_probe_len(layers) // _PAGE_SIZE) + 1, _PAGE_SIZE, dtype, device)


def _probe_len(layers: Sequence[LayerShape]) -> int:
    windows = [layer.window for layer in layers if layer.window is not None]
    return max([96, *(window + 48 for window in windows if window + 48 <= _LONGEST_PROBE)])


class _Deviation(Exception):
    """Logits are not the stock model's."""


def _check(runner: ModelRunner, decoder: D | None, tolerance: float) -> Checked[D]:
    """What the model can do; raises `_Deviation` when tokens give other logits."""
    probe = _Probe(runner, tolerance)
    probe.compare_turns()
    probe.compare_beside_far()
    return Checked(decoder, probe.accepts_embeds(), probe.no_window_reason())


class _Probe:
    """A session and another one beside it, through a runner and through the stock model.

    Args:
        runner: with `new_pages`.
        tolerance: see `check_runner`.
    """

    def __init__(self, runner: ModelRunner, tolerance: float) -> None:
        self._runner = runner
        self._tolerance = tolerance
        num_pages = runner.kv.num_pages - 1
        self._max_positions = int(
            getattr(runner.model.config.get_text_config(), "max_position_embeddings", num_pages // 2 * _PAGE_SIZE)
        )
        length = min(num_pages // 2 * _PAGE_SIZE, self._max_positions)
        vocab_size = int(runner.model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        self._neighbour = torch.randint(vocab_size, (length // 2,), generator=generator).tolist()
        self._pages, self._neighbour_pages = list(range(0, num_pages, 2)), list(range(1, num_pages, 2))
        self._cuts = sorted({1, 5, 21, length - 40, length - 1, length})
        self._stock = stock_logits(runner.model, self._ids)

    def compare_turns(self) -> None:
        """Several turns, and others beside them."""
        got, got_neighbour = [], []
        for first, last in pairwise([0, *self._cuts]):
            rows = [_row(self._ids[first:last], first, self._pages)]
            if last <= len(self._neighbour):
                rows.append(_row(self._neighbour[first:last], first, self._neighbour_pages))
            logits = self._runner.run(Batch(rows))
            got.append(logits[0])
            if last <= len(self._neighbour):
                got_neighbour.append(logits[1])
        self._require_equal("in several turns", torch.stack(got), self._stock_at_cuts)
        stock_neighbour = stock_logits(self._runner.model, self._neighbour)
        expected = stock_neighbour[[cut - 1 for cut in self._cuts[: len(got_neighbour)]]]
        self._require_equal("beside another session", torch.stack(got_neighbour), expected)

    def compare_beside_far(self) -> None:
        """Rotary scaling that looks at the longest position in a batch shows beside a row at a context's far end."""
        num_pages = -(-self._max_positions // _PAGE_SIZE)
        far = Row([0], self._max_positions - 1, [self._neighbour_pages[0]] * num_pages)
        got = self._runner.run(Batch([_row(self._ids[:32], 0, self._pages), far]))
        self._require_equal("beside a session at the end of its context", got[0], self._stock[31])

    def accepts_embeds(self) -> bool:
        """Whether embeddings may stand for tokens."""
        ids = torch.tensor(self._ids[:32], device=self._runner.kv.device)
        embeds = self._runner.model.get_input_embeddings()(ids).detach().float().cpu()
        row = replace(_row([0] * len(ids), 0, self._pages), embeds=[EmbedSpan(0, embeds)])
        try:
            got = self._runner.run(Batch([row]))
        except (ValueError, TypeError, NotImplementedError) as error:
            log.warning("input_embeds are refused: %s", error)
            return False
        return _deviation(got[0], self._stock[31]) <= self._tolerance

    def no_window_reason(self) -> str | None:
        """Tokens behind the sinks, however far, must have the logits of the places next to them; None when they do."""
        self._runner.run(Batch([_row(self._ids[:_PAGE_SIZE], 0, self._pages)]))
        got = []
        firsts = [_PAGE_SIZE, *(cut for cut in self._cuts if cut > _PAGE_SIZE)]
        try:
            for first, last in pairwise(firsts):
                row = _row(self._ids[first:last], first, self._pages)
                row = replace(row, position=first + _FAR, num_sinks=_PAGE_SIZE, num_evicted=_FAR)
                got.append(self._runner.run(Batch([row]))[0])
        except Exception as error:  # whatever a model does at positions that it has never seen
            return f"positions beyond its training fail: {error}"
        deviation = _deviation(torch.stack(got), self._stock_at_cuts[-len(got) :])
        log.info("probe: logits of %s behind %d evicted tokens deviate by %.1e", self._name, _FAR, deviation)
        if deviation <= self._tolerance:
            return None
        return f"logits behind {_FAR} evicted tokens deviate from the stock model's by {deviation:.1e}"

    @property
    def _name(self) -> str:
        return type(self._runner.model).__name__

    @property
    def _stock_at_cuts(self) -> Tensor:
        return self._stock[[cut - 1 for cut in self._cuts]]

    def _require_equal(self, situation: str, got: Tensor, expected: Tensor) -> None:
        deviation = _deviation(got, expected)
        log.info("probe: logits of %s %s deviate by %.1e", self._name, situation, deviation)
        # Written so that NaN fails too.
        if not deviation <= self._tolerance:
            raise _Deviation(
                f"logits {situation} deviate from the stock model's by {deviation:.1e} (allowed: {self._tolerance:.0e})"
            )


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Float32 logits [n, vocab_size] of one full forward pass by transformers' own attention."""
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(paged.IMPLEMENTATION)
    return logits.float()


def _row(ids: Sequence[int], first: int, pages: Sequence[int]) -> Row:
    """New tokens behind so many, and the first of these pages, as many as it takes."""
    return Row(ids, first, pages[: -(-(first + len(ids)) // _PAGE_SIZE)])


def _deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())
