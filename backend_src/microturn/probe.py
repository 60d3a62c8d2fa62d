"""Decides at load whether a model can be served: our logits against those of the untouched model, in numbers.

Not every architecture survives a packed batch with a paged cache: some never call the attention interface, some scale
rotary angles by the longest position in the batch, some pass arguments that we do not implement. A list of names would
be wrong within a month, so each model shows it for itself, here: against transformers' own modules and attention (see
`stock`), which have computed all that is compared before anything of ours does. Our own layers (`FusedDecoder`,
`TorchDecoder`) are held to the same numbers: where they fail, transformers' layers are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.batch import Batch, EmbedSpan, Row
from microturn.errors import InvalidArgument, reason_of
from microturn.kv_tensors import KVTensors
from microturn.layer_groups import LayerShape
from microturn.layers.decoder import FusedDecoder
from microturn.layers.linear import ExactLinear, Linear
from microturn.probe_attention import UnlikeOurs, check_attention
from microturn.runner import Decoder, ModelRunner
from microturn.stock import stock_logits

log = logging.getLogger(__name__)

# Largest difference of logits that rounding explains, relative to the spread of the stock logits (float32).
TOLERANCE = 1e-3
_PAGE_SIZE = 16
# A sliding window longer than this is not walked through at load: it would take minutes on a large model.
_LONGEST_PROBE = 640
# Tokens at the far end of a context.
_FAR_LEN = 24
# Tokens of a session beside another one.
_NEIGHBOUR_LEN = 24
# Tokens that a window has lost, in whole pages: some hours of talk.
_EVICTED = 1_000_000 * _PAGE_SIZE


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
        model,
        layers,
        lambda decoder: ModelRunner(
            model, new_pages(layers), use_native=use_native, decoder=decoder, exact=exact and decoder is not None
        ),
        new_decoder,
        TOLERANCE,
    )


def check_runner(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    new_runner: Callable[[D | None], ModelRunner],
    new_decoder: Callable[[], D | None],
    tolerance: float,
) -> Checked[D]:
    """Compares attention, splits, company near and far, depth and embeddings with the untouched model.

    Args:
        model: loaded with our attention.
        layers: its layers' shapes.
        new_runner: makes a runner with `new_pages` for layers of ours, or for transformers' own.
        new_decoder: makes layers of ours; None where we do not know the architecture.
        tolerance: what rounding explains, relative to the spread of the stock logits.

    Raises:
        InvalidArgument: when a session's logits would not be the stock model's.
    """
    name = type(model).__name__
    try:
        check_attention(model, layers)
        reference = _Reference.of(model, layers)
        try:
            decoder = new_decoder()
            if decoder is not None:
                return _check(new_runner(decoder), decoder, reference, tolerance)
        except Exception as reason:  # whatever does not fit our layers: transformers' own decide
            log.warning("%s runs on transformers' layers, which are slower than fused ones: %s", name, reason)
        return _check(new_runner(None), None, reference, tolerance)
    except (UnlikeOurs, _Deviation) as reason:
        raise InvalidArgument(f"{name} cannot be served: its {reason}") from None
    except Exception as error:  # whatever a model does with what it was not written for
        raise InvalidArgument(f"{name} cannot be served: its check at load fails with {reason_of(error)}") from error


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


def _check(runner: ModelRunner, decoder: D | None, reference: _Reference, tolerance: float) -> Checked[D]:
    """What the model can do; raises `_Deviation` when tokens give other logits."""
    probe = _Probe(runner, reference, tolerance)
    probe.compare_turns()
    probe.compare_far()
    return Checked(decoder, probe.accepts_embeds(), probe.no_window_reason())


@dataclass(frozen=True)
class _Reference:
    """What the untouched model says to the sessions of the check.

    Attributes:
        ids: of a session.
        logits: float32 [len(ids), vocab_size], its.
        neighbour: of another one; `neighbour_logits` are its.
        far: how many of the same ids stand at the far end of a context; `far_logits` are theirs there.
        far_position: where the first of them stands.
    """

    ids: Sequence[int]
    logits: Tensor
    neighbour: Sequence[int]
    neighbour_logits: Tensor
    far: Sequence[int]
    far_logits: Tensor
    far_position: int

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[LayerShape]) -> Self:
        """Of a model that nothing of ours has computed with."""
        length = _probe_len(layers)
        num_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
        length = min(length, num_positions)
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        neighbour = torch.randint(vocab_size, (min(length, _NEIGHBOUR_LEN),), generator=generator).tolist()
        far = ids[:_FAR_LEN]
        far_position = num_positions - len(far)
        return cls(
            ids,
            stock_logits(model, ids),
            neighbour,
            stock_logits(model, neighbour),
            far,
            stock_logits(model, far, far_position),
            far_position,
        )


class _Probe:
    """A session and another one beside it, through a runner, and what the untouched model says to them.

    Args:
        runner: with `new_pages`.
        reference: of its model.
        tolerance: see `check_runner`.
    """

    def __init__(self, runner: ModelRunner, reference: _Reference, tolerance: float) -> None:
        self._runner = runner
        self._reference = reference
        self._tolerance = tolerance
        num_pages, length = runner.kv.num_pages - 1, len(reference.ids)
        self._pages, self._neighbour_pages = list(range(0, num_pages, 2)), list(range(1, num_pages, 2))
        self._cuts = sorted({1, 5, 21, length - 40, length - 1, length})

    def compare_turns(self) -> None:
        """Several turns, and others beside them."""
        ids, neighbour = self._reference.ids, self._reference.neighbour
        got, got_neighbour = [], []
        for first, last in pairwise([0, *self._cuts]):
            rows = [_row(ids[first:last], first, self._pages)]
            if last <= len(neighbour):
                rows.append(_row(neighbour[first:last], first, self._neighbour_pages))
            logits = self._runner.run(Batch(rows))
            got.append(logits[0])
            if last <= len(neighbour):
                got_neighbour.append(logits[1])
        self._require_equal("in several turns", torch.stack(got), self._stock_at_cuts)
        expected = self._reference.neighbour_logits[[cut - 1 for cut in self._cuts[: len(got_neighbour)]]]
        self._require_equal("beside another session", torch.stack(got_neighbour), expected)

    def compare_far(self) -> None:
        """A session at the far end of its context, and one at the beginning of its own beside it.

        What looks at the longest position in a batch shows in the second, what looks at a token's own in the first.
        """
        of, got, got_near = self._reference, [], []
        cuts = [1, len(of.far) - 1, len(of.far)]
        for first, last in pairwise([0, *cuts]):
            far = _row(of.far[first:last], first, self._neighbour_pages)
            far = replace(far, position=of.far_position + first, num_evicted=of.far_position)
            logits = self._runner.run(Batch([_row(of.ids[first:last], first, self._pages), far]))
            got_near.append(logits[0])
            got.append(logits[1])
        at_cuts = [cut - 1 for cut in cuts]
        self._require_equal("beside a session at the end of its context", torch.stack(got_near), of.logits[at_cuts])
        self._require_equal("at the end of a context", torch.stack(got), of.far_logits[at_cuts])

    def accepts_embeds(self) -> bool:
        """Whether embeddings may stand for tokens."""
        ids = torch.tensor(self._reference.ids[:32], device=self._runner.kv.device)
        embeds = self._runner.model.get_input_embeddings()(ids).detach().float().cpu()
        row = replace(_row([0] * len(ids), 0, self._pages), embeds=[EmbedSpan(0, embeds)])
        try:
            got = self._runner.run(Batch([row]))
        except Exception as error:  # whatever a model does without ids
            log.warning("input_embeds are refused: %s", reason_of(error))
            return False
        return _deviation(got[0], self._reference.logits[len(ids) - 1]) <= self._tolerance

    def no_window_reason(self) -> str | None:
        """Tokens behind the sinks, however far, must have the logits of the places next to them; None when they do."""
        ids = self._reference.ids
        self._runner.run(Batch([_row(ids[:_PAGE_SIZE], 0, self._pages)]))
        got = []
        firsts = [_PAGE_SIZE, *(cut for cut in self._cuts if cut > _PAGE_SIZE)]
        try:
            for first, last in pairwise(firsts):
                row = _row(ids[first:last], first, self._pages)
                row = replace(row, position=first + _EVICTED, num_sinks=_PAGE_SIZE, num_evicted=_EVICTED)
                got.append(self._runner.run(Batch([row]))[0])
        except Exception as error:  # whatever a model does at positions that it has never seen
            return f"tokens behind {_EVICTED} evicted ones cannot be computed: {error}"
        deviation = _deviation(torch.stack(got), self._stock_at_cuts[-len(got) :])
        log.info("probe: logits of %s behind %d evicted tokens deviate by %.1e", self._name, _EVICTED, deviation)
        if deviation <= self._tolerance:
            return None
        return f"logits behind {_EVICTED} evicted tokens deviate from the stock model's by {deviation:.1e}"

    @property
    def _name(self) -> str:
        return type(self._runner.model).__name__

    @property
    def _stock_at_cuts(self) -> Tensor:
        return self._reference.logits[[cut - 1 for cut in self._cuts]]

    def _require_equal(self, situation: str, got: Tensor, expected: Tensor) -> None:
        deviation = _deviation(got, expected)
        log.info("probe: logits of %s %s deviate by %.1e", self._name, situation, deviation)
        # Written so that NaN fails too.
        if not deviation <= self._tolerance:
            raise _Deviation(
                f"logits {situation} deviate from the stock model's by {deviation:.1e} (allowed: {self._tolerance:.0e})"
            )


def _row(ids: Sequence[int], first: int, pages: Sequence[int]) -> Row:
    """New tokens behind so many, and the first of these pages, as many as it takes."""
    return Row(ids, first, pages[: -(-(first + len(ids)) // _PAGE_SIZE)])


def _deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())
