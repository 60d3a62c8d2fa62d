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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from microturn.errors import InternalError
from microturn.kv.state_pages import StatePages
from microturn.kv.state_track import block_of
from microturn.model.batch import Batch

# Names of the parameter that modules take their cache by.
_CACHES = ("cache_params", "past_key_values")

# Every state begins with the position of the token behind it, so that a state of another position is found out.
_POSITION_BYTES = 8
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Part:
    """One tensor of a state.

    Attributes:
        layer: index of the layer, as the model counts.
        number: which of the layer's states, as its module counts.
        is_recurrent: whether it is the recurrent state, else the last inputs of a convolution.
        shape: [1, ...]; `dtype` of its elements.
        offset: in the state's bytes.
    """

    layer: int
    number: int
    is_recurrent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        return self.offset + torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, state: Tensor) -> Tensor:
        """The tensor, as a view of a state's bytes."""
        return state[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Piece:
    """Some tokens of a row, within a block.

    Attributes:
        tokens: which of the batch.
        state: uint8 [bytes]: after the pass the state behind these tokens.
        before: the state before them, of the piece before; None where `state` begins as it.
        cache: over `state`, as the modules take it.
        pages: int64, where `state` is kept.
    """

    tokens: slice
    state: Tensor
    before: Tensor | None
    cache: Cache
    pages: Tensor


class RecurrentLayers:
    """The recurrent layers of one model.

    Attributes:
        num_bytes: of a state of all of them.
        pieces: of the batch whose pass runs; None outside of `carrying`.

    Args:
        parts: of a state.
        num_layers: of the model.
    """

    def __init__(self, parts: Sequence[_Part], num_layers: int) -> None:
        self.num_bytes = max(part.end for part in parts)
        self.pieces: Sequence[_Piece] | None = None
        self._parts = parts
        self._num_layers = num_layers

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
            pages.write(piece.pages, piece.state)

    def carry(self, piece: _Piece, layer: int) -> None:
        """A layer's state before a piece becomes the one that its module changes."""
        if piece.before is not None:
            for part in self._parts:
                if part.layer == layer:
                    part.of(piece.state).copy_(part.of(piece.before))

    def _pieces(self, batch: Batch, pages: StatePages, block: int) -> Iterator[_Piece]:
        start = 0
        for row in batch.rows:
            assert row.states is not None, "a row without pages for its states"
            blocks = torch.tensor(row.states, dtype=torch.int64, device=pages.device)
            position, end = row.start, row.start + len(row.token_ids)
            if position:
                state, blocks = pages.read(blocks[0]), blocks if position % block else blocks[1:]
                self._check(state, position)
            else:
                state = pages.new_state()
            before: Tensor | None = None
            for of_block in blocks:
                last = min(end, position - position % block + block)
                if position == last:
                    break
                _position_of(state)[0] = last
                cut = slice(start, start + last - position)
                yield _Piece(cut, state, before, self._cache(state), of_block)
                start, position = start + last - position, last
                before, state = state, torch.empty_like(state)
            assert position == end, "fewer pages for states than blocks"

    def _check(self, state: Tensor, position: int) -> None:
        at = int(_position_of(state)[0])
        if at != position:
            raise InternalError(f"the recurrent state of a session is that of position {at}, not of {position}")

    def _cache(self, state: Tensor) -> Cache:
        layers: list[Any] = [DummyLayer() for _ in range(self._num_layers)]
        for part in self._parts:
            if isinstance(layers[part.layer], DummyLayer):
                layers[part.layer] = LinearAttentionLayer(
                    1 + max(p.number for p in self._parts if p.layer == part.layer)
                )
            layer = layers[part.layer]
            states, is_there = (
                (layer.recurrent_states, layer.is_recurrent_states_initialized)
                if part.is_recurrent
                else (layer.conv_states, layer.is_conv_states_initialized)
            )
            states[part.number], is_there[part.number] = part.of(state), True
            layer.has_previous_state[part.number] = True
            if not part.is_recurrent:
                layer.conv_kernel_size[part.number] = part.shape[-1]
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
        outputs = []
        for piece in pieces:
            self.layers.carry(piece, self._layer)
            outputs.append(self._forward(hidden_states[:, piece.tokens], **{self._cache: piece.cache}))
        return torch.cat(outputs, dim=1)


@torch.inference_mode()
def install(model: PreTrainedModel) -> None:
    """Finds the recurrent layers of a model that has any, and makes them compute packed batches."""
    text = model.config.get_text_config()
    try:
        cache = DynamicCache(config=text)
        keeping = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        if not keeping:
            return
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True
        )
    except Exception:  # a model that cannot run with a cache; `trace_layers` reports what it can do
        return
    parts = list(_parts(cache))
    if not parts:
        return
    layers = RecurrentLayers(parts, len(cache.layers))
    for module in model.modules():
        name = _takes_states(module)
        if name is not None:
            module.forward = _Forward(module, layers, name)


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


def _parts(cache: Cache) -> Iterator[_Part]:
    offset = _POSITION_BYTES
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for is_recurrent, states in ((False, layer.conv_states), (True, layer.recurrent_states)):
            for number, tensor in states.items():
                if tensor is not None:
                    offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
                    part = _Part(index, number, is_recurrent, tuple(tensor.shape), tensor.dtype, offset)
                    offset = part.end
                    yield part


def _position_of(state: Tensor) -> Tensor:
    return state[:_POSITION_BYTES].view(torch.int64)
