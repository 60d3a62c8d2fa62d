"""Rotary position embeddings that stay exact however long a session lives.

A model's own module multiplies positions and frequencies in float32: at position 160,000 an angle is off by up to a
hundredth. Ours takes the module's place and its frequencies, and multiplies in float64. It does so only where the
layers do the same with it (see `rotary_fit`).

Rotations add up (Su et al., 2021), so that a query that is turned back by a distance sees all keys so much nearer. That
is how tokens can move closer together without touching what is cached. Knows tensors; knows no rows and no pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor, nn

_SUFFIX = "inv_freq"


class Layout(Enum):
    """Which elements of a head make a pair that is turned by one angle."""

    HALVES = "halves"  # elements i and i + n of 2n
    INTERLEAVED = "interleaved"  # elements 2i and 2i + 1

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """What belongs to the pairs' first and second elements, each [..., n], in the elements' places [..., 2n]."""
        if self is Layout.HALVES:
            return torch.cat((first, second), dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)

    def swap(self, x: Tensor) -> Tensor:
        """The elements of each pair in each other's places, [..., 2n]."""
        if self is Layout.HALVES:
            return x.roll(x.shape[-1] // 2, -1)
        return x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)


@dataclass(frozen=True)
class Rotation:
    """Turns vectors.

    Attributes:
        cos: float32 [n, 1, rotary_dim].
        sin: the same; negative for the first element of each pair.
        layout: of the pairs.
    """

    cos: Tensor
    sin: Tensor
    layout: Layout = Layout.HALVES

    def __call__(self, x: Tensor) -> Tensor:
        """Turns the first rotary_dim elements of float32 [n, heads, head_dim]."""
        rotary_dim = self.cos.shape[-1]
        given = x[..., :rotary_dim]
        turned = torch.addcmul(given * self.cos, self.layout.swap(given), self.sin)
        return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


@dataclass(frozen=True)
class Turning:
    """How a layer turns its queries and keys.

    Attributes:
        kind: the name under which the angles are kept; None where all layers have the same.
        pairs: how they lie in a head; None for a layer that knows no positions.
    """

    kind: str | None = None
    pairs: Layout | None = Layout.HALVES


class Rotary(nn.Module):
    """The angles of a model's layers.

    Args:
        inv_freq: float32 [rotary_dim / 2], angle per position, by kind of layer.
        scaling: factor of cosines and sines, by kind of layer.
        turnings: of each layer; none while that is not known.
        layout: of the cosines and sines; the layers may take them apart and pair elements otherwise.
    """

    def __init__(
        self,
        inv_freq: Mapping[str | None, Tensor],
        scaling: Mapping[str | None, float],
        turnings: Sequence[Turning],
        layout: Layout = Layout.HALVES,
    ) -> None:
        super().__init__()
        self.turnings = turnings
        # Not a submodule: a model that is converted to another type would round the module's frequencies.
        self.stock: tuple[nn.Module, ...] = ()
        self.layout = layout
        self._inv_freq = {kind: tensor.double() for kind, tensor in inv_freq.items()}
        self._scaling = scaling

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Self:
        """Takes over the frequencies that a module of transformers has now; how the layers turn is still to be told.

        Args:
            module: what the model calls for cosines and sines, with buffers named as transformers names them.
            layout: of what it returns.
        """
        names = [name for name in frequency_names(module) if "original" not in name]
        by_kind = {name.removesuffix(_SUFFIX).removesuffix("_") or None: name for name in names}
        rotary = cls(
            {kind: getattr(module, name) for kind, name in by_kind.items()},
            {kind: getattr(module, name.replace(_SUFFIX, "attention_scaling"), 1.0) for kind, name in by_kind.items()},
            [],
            layout,
        )
        rotary.stock = (module,)
        return rotary

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., rotary_dim] of positions [...], in the type of x."""
        cos, sin = self._turn(position_ids, layer_type)
        scaling = self._scaling[layer_type]
        cos, sin = ((part * scaling).to(x.dtype) for part in (cos, sin))
        return self.layout.join(cos, cos), self.layout.join(sin, sin)

    def rotation(self, layer: int, distances: Tensor) -> Rotation:
        """Turns a layer's vectors on, as if each stood at a position further by a distance.

        Args:
            layer: index of the layer.
            distances: int64 [n].
        """
        return self.rotation_of(self.turnings[layer], distances)

    def rotation_of(self, turning: Turning, distances: Tensor) -> Rotation:
        """The same for a layer that turns so."""
        if turning.pairs is None:
            nothing = torch.empty(len(distances), 1, 0, device=distances.device)
            return Rotation(nothing, nothing)
        cos, sin = (part[:, None].float() for part in self._turn(distances, turning.kind))
        return Rotation(turning.pairs.join(cos, cos), turning.pairs.join(-sin, sin), turning.pairs)

    @property
    def kinds(self) -> list[str | None]:
        """The names under which angles are kept."""
        return list(self._inv_freq)

    def _turn(self, distances: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float64 [..., rotary_dim / 2]."""
        if self._inv_freq[kind].device != distances.device:
            self._inv_freq[kind] = self._inv_freq[kind].to(distances.device)
        angles = distances[..., None].double() * self._inv_freq[kind]
        return angles.cos(), angles.sin()


def installed(model: nn.Module) -> Rotary | None:
    """The model's, where it is ours, the only one, and knows how the layers turn."""
    found = [module for module in model.modules() if isinstance(module, Rotary)]
    return found[0] if len(found) == 1 and found[0].turnings else None


def frequency_names(module: nn.Module) -> list[str]:
    """The buffers in which a module of transformers keeps its frequencies."""
    return [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_SUFFIX)]
