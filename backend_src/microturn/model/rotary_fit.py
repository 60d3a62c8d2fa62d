"""Checks whether `Rotary` can replace a model's own rotary module, and finds how its layers rotate.

It compares the queries and keys that layers pass to the attention.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.model import paged_attention as paged
from microturn.model import recurrent
from microturn.model.positions import num_positions_of
from microturn.model.rotary import Form, Layout, Rotary, Turning, frequency_names
from microturn.model.scores import Scores

log = logging.getLogger(__name__)

# Tested positions besides the end of the context; at the first, 0, vectors are not rotated.
_NEAR = [0, 1, 29]
_IS_NEAR, _IS_FAR = slice(len(_NEAR)), slice(len(_NEAR), None)
_NUM_TOKENS = 2
# Tolerances relative to the largest element: near the beginning, and added per position.
_TOLERANCE = 1e-4
_ANGLE_ERROR = 2**-22
# The same where layers compute in a narrower type: in bfloat16 an element is rounded by 2^-9 of itself, some times. A
# layer that rotates otherwise deviates by about 1.
_NARROW_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Fit:
    """How a model's rotary module is replaced.

    Attributes:
        path: of the module, by the names of the modules that it is part of.
        form: of what layers get.
        turnings: of each layer; empty if a layer's is not understood.
    """

    path: str
    form: Form
    turnings: Sequence[Turning]


@dataclass(frozen=True)
class _Heads:
    """A layer's queries and keys for the same tokens at several positions.

    Attributes:
        q: [positions, tokens, heads, head_dim].
        k: [positions, tokens, kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor

    def at(self, place: slice) -> _Heads:
        """The queries and keys at some of the positions."""
        return _Heads(self.q[place], self.k[place])

    def is_near(self, other: _Heads, tolerance: float) -> bool:
        """Whether all differences are within `tolerance` of the largest element; False with NaN."""
        pairs = ((self.q, other.q), (self.k, other.k))
        return all(bool((x - y).abs().max() <= tolerance * y.abs().max()) for x, y in pairs)


class _HeadRecorder:
    """Replaces the attention in one pass and records each layer's queries and keys.

    Its results are zero, so that a layer's input depends on the token only and not on its position.
    """

    def __init__(self, num_positions: int) -> None:
        self.layers: dict[int, _Heads] = {}
        self._num_positions = num_positions

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        self.layers[layer] = _Heads(*(x.float().view(self._num_positions, -1, *x.shape[1:]) for x in (q, k)))
        return torch.zeros_like(q)


def install(model: PreTrainedModel) -> None:
    """Replaces the rotary module of a float32 model by `Rotary` if the layers' results stay the same.

    This is tested by results, not by class names: families differ in the layout of angles and pairs, and in which
    layers rotate; some use other angles if the batch has a long session.

    Args:
        model: with our attention.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if frequency_names(child)
    ]
    far = max(_NEAR[-1] + 1, (num_positions_of(model) or 0) - 1)
    called = set()
    hooks = [child.register_forward_hook(lambda module, *_: called.add(module)) for _, _, child in places]
    try:
        stock = _heads_at(model, [*_NEAR, far])
        # Last, since a module may keep state of the longest position: `Rotary` takes the frequencies of short sessions.
        alone = _heads_at(model, _NEAR)
    except Exception as reason:  # `trace_layers` reports what the model cannot do
        log.debug("%s keeps its own rotary module: %s", type(model).__name__, reason)
        return
    finally:
        for hook in hooks:
            hook.remove()
    places = [place for place in places if place[2] in called]
    if len(places) != 1 or not _agree([heads.at(_IS_NEAR) for heads in stock], alone, _TOLERANCE):
        return
    [(parent, name, module)] = places
    for form in Form:
        ours = Rotary.of(module, form)
        setattr(parent, name, ours)
        if _does_the_same(model, stock, far):
            ours.turnings = _turnings(ours, alone)
            return
        setattr(parent, name, module)


def fit_of(model: PreTrainedModel) -> Fit | None:
    """How `install` replaced a model's rotary module; None if it did not."""
    found = ((path, part) for path, part in model.named_modules() if isinstance(part, Rotary))
    return next((Fit(path, part.form, part.turnings) for path, part in found), None)


def install_known(model: PreTrainedModel, fit: Fit) -> Rotary:
    """Replaces a model's rotary module as `fit` says, without a test."""
    parent_path, _, name = fit.path.rpartition(".")
    parent = model.get_submodule(parent_path)
    ours = Rotary.of(getattr(parent, name), fit.form)
    ours.turnings = fit.turnings
    setattr(parent, name, ours)
    return ours


def adopt(model: PreTrainedModel, few: PreTrainedModel, counterparts: Sequence[int]) -> bool:
    """Replaces a model's rotary module as that of its first layers was in float32: rounding hides how layers rotate.

    Args:
        model: with our attention, in any type.
        few: a float32 model of its first layers, after `install`.
        counterparts: of each layer of the model with attention one of `few`, counted like it, that rotates like it.

    Returns:
        Whether each layer rotates like its counterpart; True as well if the module of `few` was not replaced.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Rotary):
                setattr(parent, name, child.stock[0])
    fit = fit_of(few)
    if fit is None:
        return True
    turnings = [fit.turnings[layer] for layer in counterparts] if fit.turnings else []
    ours = install_known(model, replace(fit, turnings=turnings))
    if not turnings:
        return True
    tolerance = _TOLERANCE if model.dtype == torch.float32 else _NARROW_TOLERANCE
    of_layers = zip(turnings, _heads_at(model, _NEAR), strict=True)
    return all(_fits(ours, turning, heads, tolerance) for turning, heads in of_layers)


@torch.inference_mode()
def _heads_at(model: PreTrainedModel, positions: Sequence[int]) -> list[_Heads]:
    """Each layer's queries and keys for some tokens at each of the positions."""
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    recorder = _HeadRecorder(len(positions))
    with paged.attending(recorder), recurrent.silent(model):
        model(
            input_ids=ids.repeat(len(positions))[None].to(model.device),
            position_ids=torch.tensor(positions, device=model.device).repeat_interleave(_NUM_TOKENS)[None],
            use_cache=False,
            logits_to_keep=1,
        )
    return [recorder.layers[layer] for layer in sorted(recorder.layers)]


def _does_the_same(model: PreTrainedModel, stock: Sequence[_Heads], far: int) -> bool:
    """Whether the layers' queries and keys stay the same; with a larger tolerance at distant positions."""
    try:
        ours = _heads_at(model, [*_NEAR, far])
    except Exception:  # the layers expect cosines and sines in another form
        return False
    for place, tolerance in ((_IS_NEAR, _TOLERANCE), (_IS_FAR, _TOLERANCE + far * _ANGLE_ERROR)):
        if not _agree([heads.at(place) for heads in ours], [heads.at(place) for heads in stock], tolerance):
            return False
    return True


def _agree(some: Sequence[_Heads], others: Sequence[_Heads], tolerance: float) -> bool:
    return all(heads.is_near(other, tolerance) for heads, other in zip(some, others, strict=True))


def _turnings(rotary: Rotary, layers: Sequence[_Heads]) -> list[Turning]:
    """Finds how each layer rotates from the near positions; empty if one of them is not understood."""
    candidates = [Turning(None, None), *(Turning(kind, pairs) for kind in rotary.kinds for pairs in Layout)]
    found = []
    for heads in layers:
        fitting = (turning for turning in candidates if _fits(rotary, turning, heads, _TOLERANCE))
        turning = next(fitting, None)
        if turning is None:
            return []
        found.append(turning)
    return found


def _fits(rotary: Rotary, turning: Turning, heads: _Heads, tolerance: float) -> bool:
    """Whether a layer's queries and keys at the near positions follow from those at the first one, which is 0."""
    rotation = rotary.rotation_of(turning, torch.tensor(_NEAR, device=heads.q.device).repeat_interleave(_NUM_TOKENS))
    if rotation.cos.shape[-1] > heads.q.shape[-1]:  # the angles of layers with wider heads
        return False
    q, k = (x[:1].expand_as(x).flatten(0, 1) for x in (heads.q, heads.k))
    turned = _Heads(*(rotation(x).view(len(_NEAR), -1, *x.shape[1:]) for x in (q, k)))
    return turned.is_near(heads, tolerance)
