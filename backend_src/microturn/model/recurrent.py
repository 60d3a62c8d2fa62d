"""Recurrent layers of a packed batch: Mamba, gated delta nets, short convolutions, as transformers implements them.

Their modules take a sequence and the state before it. Here each row of a batch is a sequence of its own, whose states
are in the session's pages (see `StateTrack`), and a row is cut at the ends of blocks, so that the state there is kept::

    row      tokens 50 … 199          blocks of 64
    pieces   50 … 63 | 64 … 127 | 128 … 191 | 192 … 199
    states   read    kept       kept        kept       written: the next row goes on from here

A module is found by what it is called with: it takes transformers' cache, and keeps a state in it.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from microturn.errors import InternalError
from microturn.kv.state_pages import StatePages
from microturn.kv.state_track import block_of
from microturn.model.batch import Batch, Row
from microturn.model.state_parts import StatePart, parts_of, positions_of
from microturn.model.stock import untouched

log = logging.getLogger(__name__)

# Names of the parameter that modules take their cache by.
_CACHES = ("cache_params", "past_key_values")


@dataclass(frozen=True)
class _Piece:
    """Some tokens of a row, within a block; or the only ones of several rows, which are computed at once.

    Attributes:
        tokens: int64 [sequences, tokens], which of the batch.
        states: uint8 [sequences, bytes]: after the pass the states behind these tokens.
        before: the states before them, of the piece before; None where `states` begin as these.
        cache: over `states`, as the modules take it.
        pages: int64 [sequences, pages of a state], where `states` are kept.
    """

    tokens: Tensor
    states: Tensor
    before: Tensor | None
    cache: Cache
    pages: Tensor


class RecurrentLayers:
    """The recurrent layers of one model.

    Attributes:
        num_bytes: of a state of all of them.
        num_layers: how many keep one.
        pieces: of the batch whose pass runs; None outside of `carrying`.

    Args:
        parts: of a state.
        num_model_layers: of the model, those of attention included.
    """

    def __init__(self, parts: Sequence[StatePart], num_model_layers: int) -> None:
        self.num_bytes = max(part.end for part in parts)
        self.num_layers = len({part.layer for part in parts})
        self.pieces: Sequence[_Piece] | None = None
        self._parts = parts
        self._num_model_layers = num_model_layers
        self._num_states = Counter(part.layer for part in parts if not part.is_recurrent)

    @contextmanager
    def carrying(self, batch: Batch, pages: StatePages, page_size: int) -> Iterator[None]:
        """The forward pass of a batch: reads the rows' states, and writes the new ones once the pass has succeeded.

        Raises:
            InternalError: the pages have no state of the position where a row begins.
        """
        self.pieces = pieces = list(self._pieces(batch, pages, block_of(page_size)))
        try:
            yield
        finally:
            self.pieces = None
        for piece in pieces:
            pages.write(piece.pages, piece.states)

    def carry(self, piece: _Piece, layer: int) -> None:
        """A layer's states before a piece become those that its module changes."""
        if piece.before is not None:
            for part in self._parts:
                if part.layer == layer:
                    part.of(piece.states).copy_(part.of(piece.before))

    def _pieces(self, batch: Batch, pages: StatePages, block: int) -> Iterator[_Piece]:
        firsts = accumulate((len(row.token_ids) for row in batch.rows), initial=0)
        decoding: list[tuple[Row, int]] = []
        others: list[tuple[Row, int]] = []
        for row, first in zip(batch.rows, firsts, strict=False):
            (decoding if row.start and len(row.token_ids) == 1 else others).append((row, first))
        if decoding:
            yield self._single_tokens(decoding, pages, block)
        for row, first in others:
            yield from self._pieces_of(row, first, pages, block)

    def _single_tokens(self, rows: Sequence[tuple[Row, int]], pages: StatePages, block: int) -> _Piece:
        """The rows of one token, each behind others."""
        blocks = [_states_of(row, pages) for row, _ in rows]
        states = pages.read(torch.stack([of_row[0] for of_row in blocks]))
        positions = torch.tensor([row.start for row, _ in rows], device=pages.device)
        self._check(states, positions)
        positions_of(states).copy_(positions + 1)
        targets = [of_row[0 if row.start % block else 1] for of_row, (row, _) in zip(blocks, rows, strict=True)]
        tokens = torch.tensor([[first] for _, first in rows], device=pages.device)
        return _Piece(tokens, states, None, self._cache(states), torch.stack(targets))

    def _pieces_of(self, row: Row, first: int, pages: StatePages, block: int) -> Iterator[_Piece]:
        """A row, cut at the ends of blocks."""
        blocks, position, end = _states_of(row, pages), row.start, row.start + len(row.token_ids)
        states = pages.read(blocks[:1]) if position else pages.new_states(1)
        self._check(states, torch.tensor([position], device=pages.device))
        before: Tensor | None = None
        for of_block in blocks if position % block or not position else blocks[1:]:
            last = min(end, position - position % block + block)
            if position == last:
                break
            positions_of(states).fill_(last)
            tokens = torch.arange(first, first + last - position, device=pages.device)[None]
            yield _Piece(tokens, states, before, self._cache(states), of_block[None])
            first, position = first + last - position, last
            before, states = states, torch.empty_like(states)
        assert position == end, "fewer pages for states than blocks"

    def _check(self, states: Tensor, positions: Tensor) -> None:
        found = positions_of(states)
        if not torch.equal(found, positions):
            raise InternalError(
                f"recurrent states of positions {found.tolist()} are in the pages of those of {positions.tolist()}"
            )

    def _cache(self, states: Tensor) -> Cache:
        """The states as the modules take them."""
        # Placeholders: a layer with attention takes no cache. (`DummyLayer` is not in each transformers that we allow.)
        layers: list[Any] = [DynamicLayer() for _ in range(self._num_model_layers)]
        for part in self._parts:
            if part.number == 0 and isinstance(layers[part.layer], DynamicLayer):
                layers[part.layer] = LinearAttentionLayer(self._num_states[part.layer])
            layer, tensor = layers[part.layer], part.of(states)
            if part.is_recurrent:
                layer.recurrent_states[part.number] = tensor
                layer.is_recurrent_states_initialized[part.number] = True
            else:
                layer.conv_states[part.number] = tensor
                layer.is_conv_states_initialized[part.number] = True
                layer.conv_kernel_size[part.number] = tensor.shape[-1]
            layer.has_previous_state[part.number] = True
        return Cache(layers=layers)


class _Forward:
    """Replaces a module's `forward`: in passes of a batch each piece is computed with its own state.

    Args:
        module: the recurrent layer's.
        layers: of the model.
        cache: name of the parameter that takes the cache.
    """

    def __init__(self, module: nn.Module, layers: RecurrentLayers, cache: str) -> None:
        self.layers = layers
        self._forward: Callable[..., Tensor] = module.forward
        self._layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._cache = cache

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pieces = self.layers.pieces
        if pieces is None:
            return self._forward(hidden_states, *args, **kwargs)
        # Our attention says what is visible; there is no padding.
        out = torch.zeros_like(hidden_states)
        for piece in pieces:
            self.layers.carry(piece, self._layer)
            out[0, piece.tokens] = self._forward(hidden_states[0, piece.tokens], **{self._cache: piece.cache})
        return out


@torch.inference_mode()
def install(model: PreTrainedModel) -> None:
    """Finds the recurrent layers of a model that has any, and makes them compute packed batches.

    To be called again when the model has been converted to another type: its states are of that type then.
    """
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Forward):
            del module.forward
    try:
        cache = DynamicCache(config=model.config.get_text_config())
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            return
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        with untouched(model):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as reason:  # `trace_layers` reports what the model cannot do
        log.debug("%s does not run with a cache: %s", type(model).__name__, reason)
        return
    parts = list(parts_of(cache))
    if not parts:
        return
    layers = RecurrentLayers(parts, len(cache.layers))
    for module in model.modules():
        name = _takes_states(module)
        if name is not None:
            module.forward = _Forward(module, layers, name)


@contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    """Passes in which recurrent layers bring nothing from one token to another: their results are zero."""
    layers = installed(model)
    if layers is None:
        yield
        return
    layers.pieces = ()
    try:
        yield
    finally:
        layers.pieces = None


def installed(model: nn.Module) -> RecurrentLayers | None:
    """The model's recurrent layers, None if it has none."""
    found = (module.__dict__.get("forward") for module in model.modules())
    return next((forward.layers for forward in found if isinstance(forward, _Forward)), None)


def state_bytes(model: nn.Module) -> int:
    """Bytes of a session's state; 0 without recurrent layers."""
    layers = installed(model)
    return 0 if layers is None else layers.num_bytes


def _takes_states(module: nn.Module) -> str | None:
    """The parameter by which a recurrent layer's module takes its state; None for other modules."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    if not has_convolution or not hasattr(module, "layer_idx"):
        return None
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def _states_of(row: Row, pages: StatePages) -> Tensor:
    assert row.states is not None, "a row without pages for its states"
    return torch.tensor(row.states, dtype=torch.int64, device=pages.device)
