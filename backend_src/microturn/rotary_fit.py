"""Finds out by what a model does whether our rotary embedding can take the place of its own, and how its layers turn.

Compares what layers hand to the attention. Knows no attention, no pages and no logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.rotary import Layout, Rotary, Turning, frequency_names

log = logging.getLogger(__name__)

# Where a model's module is looked at besides the end of its context; what layers do at the first is what they turn on.
_NEAR = [0, 1, 29]
_IS_NEAR, _IS_FAR = slice(len(_NEAR)), slice(len(_NEAR), None)
_NUM_TOKENS = 2
# Parts of the largest element: what rounding explains near the beginning, and more for each position further on.
_TOLERANCE = 1e-4
_ANGLE_ERROR = 2**-22


@dataclass(frozen=True)
class _Heads:
    """What a layer hands to the attention for the same tokens at several positions.

    Attributes:
        q: [positions, tokens, heads, head_dim].
        k: [positions, tokens, kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor

    def at(self, place: slice) -> _Heads:
        """At some of the positions."""
        return _Heads(self.q[place], self.k[place])

    def is_near(self, other: _Heads, tolerance: float) -> bool:
        """Whether nothing differs by more than a part of the largest element; false where something is not a number."""
        pairs = ((self.q, other.q), (self.k, other.k))
        return all(bool((x - y).abs().max() <= tolerance * y.abs().max()) for x, y in pairs)


class _HeadRecorder:
    """Stands in for the attention of one pass and keeps what each layer asks it.

    It attends to nothing, so that what a layer is given depends on the token alone, and on its position not at all.
    """

    def __init__(self, num_positions: int) -> None:
        self.layers: dict[int, _Heads] = {}
        self._num_positions = num_positions

    def append_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        self.layers[layer] = _Heads(*(x.float().view(self._num_positions, -1, *x.shape[1:]) for x in (q, k)))
        return q.new_zeros(*q.shape[:2], v.shape[-1])


def install(model: PreTrainedModel) -> None:
    """Puts ours in the place of the model's module where the layers do the same with it; else that one stays.

    What they do is looked at, and not what they are called: families differ in where they put the two angles of a pair,
    which elements make one, and which layers turn at all; some turn by other angles when the batch has a long session.

    Args:
        model: with our attention.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if frequency_names(child)
    ]
    far = max(_NEAR[-1] + 1, int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0) - 1)
    called = set()
    hooks = [child.register_forward_hook(lambda module, *_: called.add(module)) for _, _, child in places]
    try:
        stock = _heads_at(model, [*_NEAR, far])
        # Last, since a module may keep what it needs for the longest position: ours takes what is for short sessions.
        alone = _heads_at(model, _NEAR)
    except Exception as reason:  # whatever a model cannot do: `trace_layers` says so
        log.debug("%s keeps its own rotary module: %s", type(model).__name__, reason)
        return
    finally:
        for hook in hooks:
            hook.remove()
    places = [place for place in places if place[2] in called]
    if len(places) != 1 or not _agree([heads.at(_IS_NEAR) for heads in stock], alone, _TOLERANCE):
        return
    [(parent, name, module)] = places
    for layout in Layout:
        ours = Rotary.of(module, layout)
        setattr(parent, name, ours)
        if _does_the_same(model, stock, far):
            ours.turnings = _turnings(ours, alone)
            return
        setattr(parent, name, module)


@torch.inference_mode()
def _heads_at(model: PreTrainedModel, positions: Sequence[int]) -> list[_Heads]:
    """What each layer hands to the attention for some tokens at each of the positions."""
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    recorder = _HeadRecorder(len(positions))
    model(
        input_ids=ids.repeat(len(positions))[None].to(model.device),
        position_ids=torch.tensor(positions, device=model.device).repeat_interleave(_NUM_TOKENS)[None],
        use_cache=False,
        logits_to_keep=1,
        paged=recorder,
    )
    return [recorder.layers[layer] for layer in sorted(recorder.layers)]


def _does_the_same(model: PreTrainedModel, stock: Sequence[_Heads], far: int) -> bool:
    """Whether layers hand over what they did; far out, where the model's own angles are inexact, about that."""
    try:
        ours = _heads_at(model, [*_NEAR, far])
    except Exception:  # cosines and sines in another form than the layers take
        return False
    for place, tolerance in ((_IS_NEAR, _TOLERANCE), (_IS_FAR, _TOLERANCE + far * _ANGLE_ERROR)):
        if not _agree([heads.at(place) for heads in ours], [heads.at(place) for heads in stock], tolerance):
            return False
    return True


def _agree(some: Sequence[_Heads], others: Sequence[_Heads], tolerance: float) -> bool:
    return all(heads.is_near(other, tolerance) for heads, other in zip(some, others, strict=True))


def _turnings(rotary: Rotary, layers: Sequence[_Heads]) -> list[Turning]:
    """How layers turn, by what they hand over at the near positions; none where one of them does it in another way."""
    candidates = [Turning(None, None), *(Turning(kind, pairs) for kind in rotary.kinds for pairs in Layout)]
    found = []
    for heads in layers:
        fitting = (turning for turning in candidates if _turned(rotary, turning, heads).is_near(heads, _TOLERANCE))
        turning = next(fitting, None)
        if turning is None:
            return []
        found.append(turning)
    return found


def _turned(rotary: Rotary, turning: Turning, heads: _Heads) -> _Heads:
    """What a layer that turns so would hand over at the near positions, by what it does at the first, which is 0."""
    rotation = rotary.rotation_of(turning, torch.tensor(_NEAR, device=heads.q.device).repeat_interleave(_NUM_TOKENS))
    q, k = (x[:1].expand_as(x).flatten(0, 1) for x in (heads.q, heads.k))
    return _Heads(*(rotation(x).view(len(_NEAR), -1, *x.shape[1:]) for x in (q, k)))
