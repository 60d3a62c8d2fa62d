"""Paged attention of one step, plugged into transformers through its AttentionInterface.

A model built with ``attn_implementation=IMPLEMENTATION`` calls `_forward` in every layer with the packed queries, keys
and values of all rows; they go to the attention that `attending` has set. A keyword argument of the model's forward
would not do: the layers of some families do not hand them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model import dense_attention as dense
from microturn.model import latent_attention
from microturn.model.batch import Batch
from microturn.model.paged_step import PagedStep
from microturn.model.rotary import Rotary, Rotation, Turning
from microturn.model.scores import Scores
from microturn.model.step_attention import Attention

if TYPE_CHECKING:  # what only a CPU needs: Numba
    from microturn.model.cpu.attention import NativePlan
    from microturn.model.cpu.attention_work import LayerStep

IMPLEMENTATION = "microturn_paged"

# Arguments that change the attention and are not implemented here.
_UNSUPPORTED = ("sinks", "attention_bias", "position_bias")


class _KindPlan:
    """The step for one kind of layers.

    Attributes:
        steps: for each group of the layers.
        native: the plan of the native kernel; None if torch computes the attention.
        moved: int64 [n], the queries of rows with moved sinks.
        moved_by: int64 [n], how far.
    """

    def __init__(self, steps: Sequence[PagedStep], *, native: bool) -> None:
        self.steps = steps
        self.native = _native_plan(steps) if native else None
        self.moved, self.moved_by = steps[0].moved_queries()


def _native_plan(steps: Sequence[PagedStep]) -> NativePlan:
    from microturn.model.cpu.attention import NativePlan

    return NativePlan(steps)


class PagedAttention:
    """The attention of one step over all layers.

    Attributes:
        kv: the pages.
        is_native: whether the native kernel computes it.

    Args:
        batch: the rows.
        kv: their pages; the native kernel computes over panels, torch over pages in HND.
        rotary: of the model; needed for moved sinks. The native kernel gets the queries of such rows a second time,
            rotated back by the distance, so that shared pages need not change.
    """

    def __init__(self, batch: Batch, kv: KVTensors, *, rotary: Rotary | None = None) -> None:
        self.kv = kv
        self.is_native = kv.layout is PageLayout.PANELS
        self._kinds = [
            _KindPlan(PagedStep.plan(batch, kv.page_size, number, kind.num_groups), native=self.is_native)
            for number, kind in enumerate(kv.groups.kinds)
        ]
        self._rotary = rotary
        self._rotations: dict[tuple[int, Turning | None], Rotation] = {}
        # The native kernel's result for the layer before: new memory would be mapped again in each layer.
        self._out: Tensor | None = None

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Writes the new keys and values of a layer into their pages and attends over each row's whole context.

        Args:
            layer: index of the layer.
            q: [tokens, heads, head_dim], packed over the rows.
            k: [tokens, kv_heads, head_dim]; `v` likewise.
            scores: of the layer.

        Returns:
            [tokens, heads, head_dim], valid until the next layer.
        """
        kv, place = self.kv.layers[layer], self.kv.groups.places[layer]
        kind = self._kinds[place.kind]
        if kind.native is None:
            step, out = kind.steps[place.group], torch.empty_like(q)
            dense.append(kv, k, v, step)
            dense.attend(q, kv, step, scores, partial(self._rotation, layer), out)
            return out
        if self._out is None or self._out.shape != q.shape:
            self._out = torch.empty_like(q)
        if len(kind.moved):
            q = torch.cat((q, self._turn_back(layer, place.kind)(q[torch.from_numpy(kind.moved)])))
        kind.native.append_and_attend(place.group, q, k, v, kv, scores, self._out)
        return self._out

    def layer_step(self, layer: int, num_heads: int, scores: Scores) -> LayerStep:
        """The step as the native kernel takes it, for a layer and others of its kind, scores and rotary embedding."""
        from microturn.model.cpu.angles import Angles
        from microturn.model.cpu.attention_scores import KernelScores
        from microturn.model.cpu.attention_work import LayerStep

        place = self.kv.groups.places[layer]
        kind, shape = self._kinds[place.kind], self.kv.groups.slots[place.slot]
        assert kind.native is not None
        back = Angles.of_rotation(self._turn_back(layer, place.kind)) if len(kind.moved) else Angles.none()
        work = kind.native.work(num_heads, shape.num_kv_heads, shape.head_dim, scores.window)
        return LayerStep(KernelScores.of(scores), kind.native.tables, work, kind.moved, back)

    def _turn_back(self, layer: int, kind: int) -> Rotation:
        """The rotation of queries with moved sinks, cached for the layers of a kind with the same angles."""
        turning = None if self._rotary is None else self._rotary.turnings[layer]
        if (kind, turning) not in self._rotations:
            self._rotations[kind, turning] = self._rotation(layer, torch.from_numpy(-self._kinds[kind].moved_by))
        return self._rotations[kind, turning]

    def _rotation(self, layer: int, distances: Tensor) -> Rotation:
        if self._rotary is None:
            raise NotImplementedError("the rotary embedding of its layers is not known")
        return self._rotary.rotation(layer, distances)


_current: ContextVar[Attention] = ContextVar("the attention of the pass that runs")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """A pass of a model with our attention: what its layers attend by."""
    before = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(before)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  always None: the pages say what is visible
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: query [1, heads, tokens, head_dim], key likewise, value [1, kv_heads, tokens, value_dim].

    Values of another size than keys are made as large, by zeros, or the others as large as them: it leaves products and
    sums as they are.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with '{name}'")
    latent = latent_attention.heads_of(module)
    if latent is not None:
        query = latent.queries(query)
    head_dim, value_dim = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    q, k, v = (_widened(tensor[0].transpose(0, 1), head_dim).contiguous() for tensor in (query, key, value))
    scores = scores_of(scaling, sliding_window, kwargs)
    out = _current.get().append_and_attend(layer_of(module), q, k, v, scores)[None, ..., :value_dim]
    return (out if latent is None else latent.values(out)), None


def scores_of(scaling: float, window: int | None, arguments: Mapping[str, Any]) -> Scores:
    """The scores of a layer of transformers, by the arguments with which it calls its attention."""
    sink_logits: Tensor | None = arguments.get("s_aux")
    return Scores(
        scaling, window, arguments.get("softcap"), None if sink_logits is None else sink_logits.detach().float()
    )


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """Heads [tokens, heads, any], of this size by zeros."""
    return heads if heads.shape[-1] == head_dim else F.pad(heads, (0, head_dim - heads.shape[-1]))


def number_layers(model: nn.Module, numbers: Sequence[int] | None) -> None:
    """Says which of a model's layers have attention, so that `layer_of` counts those only; None counts all."""
    for module in model.modules():
        module.__dict__.pop("attention_layer", None)
        if numbers is not None and getattr(module, "layer_idx", None) in numbers:
            module.__dict__["attention_layer"] = numbers.index(module.layer_idx)


def numbers_of(model: nn.Module) -> list[int]:
    """Which of a model's layers have attention, as `number_layers` was told; empty if it was not."""
    return sorted({vars(module)["layer_idx"] for module in model.modules() if "attention_layer" in vars(module)})


def layer_of(module: nn.Module) -> int:
    """The number of an attention module's layer, among those with attention."""
    layer: int = module.__dict__.get("attention_layer", module.layer_idx)
    return layer


def register() -> None:
    """Registers IMPLEMENTATION with transformers."""
    AttentionInterface.register(IMPLEMENTATION, _forward)
