"""Checks at load whether a model can be served: compares our logits with those of the unmodified model.

Not every architecture works with a packed batch and a paged cache: some never call the attention interface, some scale
rotary angles by the longest position in the batch, some pass arguments that are not implemented here. A list of
supported names would soon be outdated, so each model is checked itself, against transformers' own modules and attention
(see `stock`), whose results are computed before any of our code runs. Our own layers (`FusedLayers`, `TorchLayers`)
must give the same numbers: if they fail, transformers' layers are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument, reason_of
from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.model.batch import Batch, EmbedSpan
from microturn.model.positions import num_positions_of
from microturn.model.probe_attention import UnlikeOurs, check_attention
from microturn.model.probe_pages import PAGE_SIZE, SessionPages, new_pages, probe_len
from microturn.model.runner import ModelRunner, TransformerLayers
from microturn.model.stock import stock_logits

if TYPE_CHECKING:  # what only a CPU needs: Numba
    from microturn.model.cpu.layers import FusedLayers

log = logging.getLogger(__name__)

# Largest difference of logits that rounding explains, relative to the spread of the stock logits (float32).
TOLERANCE = 1e-3
# Tokens at the far end of a context, and of the second session in the batch.
_SHORT_LEN = 24
# Evicted tokens, in whole pages: some hours of speech.
_EVICTED = 1_000_000 * PAGE_SIZE

D = TypeVar("D", bound=TransformerLayers)


@dataclass(frozen=True)
class Checked(Generic[D]):
    """How a model can be served.

    Attributes:
        decoder: our implementation of the layers, or None for transformers' own.
        accepts_embeds: whether embeddings may replace tokens.
        no_window_reason: why sessions cannot have a sliding window; None if they can.
        no_fused_reason: why transformers' own layers run; None if ours do.
    """

    decoder: D | None
    accepts_embeds: bool
    no_window_reason: str | None
    no_fused_reason: str | None = None


def check_model(model: PreTrainedModel, layers: Sequence[LayerShape], layout: PageLayout) -> Checked[FusedLayers]:
    """Checks a model on a CPU, in float32: see `check_runner`.

    Args:
        model: loaded with our attention; unchanged afterwards.
        layers: its layers' shapes.
        layout: of the pages, which says what computes the attention.

    Raises:
        InvalidArgument: a session's logits would differ from the stock model's.
    """
    from microturn.model.cpu.layers import FusedLayers

    return check_runner(
        model,
        layers,
        lambda decoder: ModelRunner(model, new_pages(model, layers, layout=layout), decoder=decoder),
        lambda: FusedLayers.of(model, layers),
        TOLERANCE,
    )


def check_runner(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    new_runner: Callable[[D | None], ModelRunner],
    new_decoder: Callable[[], D],
    tolerance: float,
) -> Checked[D]:
    """Compares attention, chunks, batching, distant positions, windows and embeddings with the unmodified model.

    Args:
        model: loaded with our attention.
        layers: its layers' shapes.
        new_runner: creates a runner with `new_pages` for our layers, or for transformers' own.
        new_decoder: creates our layers; raises where it cannot, as for an unknown architecture.
        tolerance: the allowed difference, relative to the spread of the stock logits.

    Raises:
        InvalidArgument: a session's logits would differ from the stock model's.
    """
    name = type(model).__name__
    try:
        check_attention(model, layers)
        reference = _Reference.of(model, layers)
        try:
            decoder = new_decoder()
            return _check(new_runner(decoder), decoder, reference, tolerance)
        except Exception as error:  # our layers do not fit: transformers' own are tried
            reason = str(error)
        log.warning("%s runs on transformers' layers, which are slower than fused ones: %s", name, reason)
        return replace(_check(new_runner(None), None, reference, tolerance), no_fused_reason=reason)
    except UnlikeOurs as reason:
        raise InvalidArgument(f"{name} cannot be served: its {reason}") from None
    except Exception as error:  # a model may raise anything for unexpected input
        raise InvalidArgument(f"{name} cannot be served: its check at load fails with {reason_of(error)}") from error


def _check(runner: ModelRunner, decoder: D | None, reference: _Reference, tolerance: float) -> Checked[D]:
    """Runs the checks; raises `UnlikeOurs` if tokens give other logits."""
    probe = _Probe(runner, reference, tolerance)
    probe.compare_turns()
    probe.compare_far()
    return Checked(decoder, probe.accepts_embeds(), probe.no_window_reason())


@dataclass(frozen=True)
class _Reference:
    """The unmodified model's logits for the sessions of the check.

    Attributes:
        ids: of the first session.
        logits: float32 [len(ids), vocab_size], of the first session.
        neighbour: ids of the second session; `neighbour_logits` likewise.
        far: how many of the same ids are at the far end of a context; `far_logits` likewise.
        far_position: position of the first of them.
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
        """Computes the reference before any of our code has run with the model."""
        length = probe_len(layers)
        num_positions = num_positions_of(model) or length
        length = min(length, num_positions)
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        neighbour = torch.randint(vocab_size, (min(length, _SHORT_LEN),), generator=generator).tolist()
        # What is evicted before the last positions is of whole pages.
        far_position = max(0, num_positions - _SHORT_LEN) // PAGE_SIZE * PAGE_SIZE
        far = ids[: num_positions - far_position]
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
    """Runs two sessions through a runner and compares them with the reference.

    Args:
        runner: with `new_pages`.
        reference: of the runner's model.
        tolerance: see `check_runner`.
    """

    def __init__(self, runner: ModelRunner, reference: _Reference, tolerance: float) -> None:
        self._name = type(runner.model).__name__
        self._runner = runner
        self._reference = reference
        self._tolerance = tolerance
        num_pages, length = runner.kv.num_pages - 1, len(reference.ids)
        self._pages = SessionPages.of(runner.kv, range(0, num_pages, 2), length)
        self._neighbour_pages = SessionPages.of(runner.kv, range(1, num_pages, 2), length)
        self._cuts = sorted({1, 5, 21, length - 40, length - 1, length})

    def compare_turns(self) -> None:
        """Several turns, alone and batched with another session."""
        ids, neighbour = self._reference.ids, self._reference.neighbour
        got, got_neighbour = [], []
        for first, last in pairwise([0, *self._cuts]):
            rows = [self._pages.row(ids[first:last], first)]
            if last <= len(neighbour):
                rows.append(self._neighbour_pages.row(neighbour[first:last], first))
            logits = self._runner.run(Batch(rows))
            got.append(logits[0])
            if last <= len(neighbour):
                got_neighbour.append(logits[1])
        self._require_equal("in several turns", torch.stack(got), self._stock_at_cuts)
        expected = self._reference.neighbour_logits[[cut - 1 for cut in self._cuts[: len(got_neighbour)]]]
        self._require_equal("beside another session", torch.stack(got_neighbour), expected)

    def compare_far(self) -> None:
        """A session at the far end of its context, batched with one at the beginning.

        Errors from the longest position in a batch show in the second, errors from a token's own in the first.
        """
        of, got, got_near = self._reference, [], []
        cuts = [1, len(of.far) - 1, len(of.far)]
        for first, last in pairwise([0, *cuts]):
            far = self._neighbour_pages.row(of.far[first:last], first)
            far = far._replace(position=of.far_position + first, num_evicted=of.far_position)
            logits = self._runner.run(Batch([self._pages.row(of.ids[first:last], first), far]))
            got_near.append(logits[0])
            got.append(logits[1])
        at_cuts = [cut - 1 for cut in cuts]
        self._require_equal("beside a session at the end of its context", torch.stack(got_near), of.logits[at_cuts])
        self._require_equal("at the end of a context", torch.stack(got), of.far_logits[at_cuts])

    def accepts_embeds(self) -> bool:
        """Whether embeddings may replace tokens."""
        ids = torch.tensor(self._reference.ids[:32], device=self._runner.kv.device)
        embeds = self._runner.model.get_input_embeddings()(ids).detach().float().cpu()
        row = self._pages.row([0] * len(ids), 0)
        try:
            # Of no tokens: some models look up whose embeddings they are given, for what else they know of a token.
            self._runner.run(Batch([row._replace(embeds=[EmbedSpan(0, embeds.roll(1, dims=-1))])]))
            got = self._runner.run(Batch([row._replace(embeds=[EmbedSpan(0, embeds)])]))
        except Exception as error:  # a model may raise anything without ids
            log.warning("input_embeds are refused: %s", reason_of(error))
            return False
        return _deviation_of(got[0], self._reference.logits[len(ids) - 1]) <= self._tolerance

    def no_window_reason(self) -> str | None:
        """Checks that tokens at any distance behind the sinks have the logits of adjacent positions; None if so."""
        if self._runner.kv.states is not None:
            return "its recurrent layers remember what a window evicts"
        ids = self._reference.ids
        self._runner.run(Batch([self._pages.row(ids[:PAGE_SIZE], 0)]))
        got = []
        firsts = [PAGE_SIZE, *(cut for cut in self._cuts if cut > PAGE_SIZE)]
        try:
            for first, last in pairwise(firsts):
                row = self._pages.row(ids[first:last], first)
                row = row._replace(position=first + _EVICTED, num_sinks=PAGE_SIZE, num_evicted=_EVICTED)
                got.append(self._runner.run(Batch([row]))[0])
        except Exception as error:  # a model may raise anything at unseen positions
            return f"tokens behind {_EVICTED} evicted ones cannot be computed: {error}"
        deviation = _deviation_of(torch.stack(got), self._stock_at_cuts[-len(got) :])
        log.info("probe: logits of %s behind %d evicted tokens deviate by %.1e", self._name, _EVICTED, deviation)
        if deviation <= self._tolerance:
            return None
        return f"logits behind {_EVICTED} evicted tokens deviate from the stock model's by {deviation:.1e}"

    @property
    def _stock_at_cuts(self) -> Tensor:
        return self._reference.logits[[cut - 1 for cut in self._cuts]]

    def _require_equal(self, situation: str, got: Tensor, expected: Tensor) -> None:
        deviation = _deviation_of(got, expected)
        log.info("probe: logits of %s %s deviate by %.1e", self._name, situation, deviation)
        # Written so that NaN fails too.
        if not deviation <= self._tolerance:
            raise UnlikeOurs(
                f"logits {situation} deviate from the stock model's by {deviation:.1e} (allowed: {self._tolerance:.0e})"
            )


def _deviation_of(got: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, relative to the spread of the expected ones."""
    return float((got - expected).abs().max() / expected.std())
