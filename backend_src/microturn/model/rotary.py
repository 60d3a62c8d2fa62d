"""Rotary position embeddings that stay exact at any position.

A model's own module multiplies positions and frequencies in float32: at position 160,000 an angle is off by up to 0.01.
`Rotary` replaces the module, takes its frequencies, and multiplies in float64. It is installed only if the layers'
results stay the same (see `rotary_fit`).

Rotations add up (Su et al., 2021): a query that is rotated back by a distance sees all keys nearer by that distance. So
the sinks can move up to the window without changing cached keys.
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
    """Which elements of a head form a pair that is rotated by one angle."""

    HALVES = "halves"  # elements i and i + n of 2n
    INTERLEAVED = "interleaved"  # elements 2i and 2i + 1

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Joins the pairs' first and second elements, each [..., n], in the layout's order [..., 2n]."""
        if self is Layout.HALVES:
            return torch.cat((first, second), dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and second elements of the pairs in [..., 2n], each [..., n]: what `join` joins."""
        if self is Layout.HALVES:
            half = x.shape[-1] // 2
            return x[..., :half], x[..., half:]
        return x[..., ::2], x[..., 1::2]

    def swap(self, x: Tensor) -> Tensor:
        """Swaps the elements of each pair, [..., 2n]."""
        if self is Layout.HALVES:
            return x.roll(x.shape[-1] // 2, -1)
        return x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)


class Form(Enum):
    """What layers get of the cosine and the sine of each pair."""

    HALVES = "halves"  # both twice, as `Layout.HALVES` has the elements of pairs
    INTERLEAVED = "interleaved"  # likewise
    ONCE = "once"  # both once
    COMPLEX = "complex"  # as the complex number of that angle

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Cosines and sines [..., pairs] in this form."""
        if self is Form.COMPLEX:
            return torch.complex(cos, sin)
        if self is Form.ONCE:
            return cos, sin
        layout = Layout(self.value)
        return layout.join(cos, cos), layout.join(sin, sin)


@dataclass(frozen=True)
class Rotation:
    """Rotates vectors.

    Attributes:
        cos: float32 [n, 1, rotary_dim].
        sin: the same; negative for the first element of each pair.
        layout: of the pairs.
    """

    cos: Tensor
    sin: Tensor
    layout: Layout = Layout.HALVES

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates the first rotary_dim elements of float32 [n, heads, head_dim]."""
        rotary_dim = self.cos.shape[-1]
        given = x[..., :rotary_dim]
        turned = torch.addcmul(given * self.cos, self.layout.swap(given), self.sin)
        return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


@dataclass(frozen=True)
class Turning:
    """How a layer rotates its queries and keys.

    Attributes:
        kind: name of its angles; None if all layers have the same.
        pairs: their layout in a head; None for a layer without positions.
    """

    kind: str | None = None
    pairs: Layout | None = Layout.HALVES


class Rotary(nn.Module):
    """The angles of a model's layers.

    Args:
        inv_freq: float32 [rotary_dim / 2], angle per position, by kind of layer.
        scaling: factor of cosines and sines, by kind of layer.
        turnings: of each layer; empty while unknown.
        form: of the cosines and sines; layers may pair elements in another way.
    """

    def __init__(
        self,
        inv_freq: Mapping[str | None, Tensor],
        scaling: Mapping[str | None, float],
        turnings: Sequence[Turning],
        form: Form = Form.HALVES,
    ) -> None:
        super().__init__()
        self.turnings = turnings
        # Not a submodule: converting the model to another type would round the module's frequencies.
        self.stock: tuple[nn.Module, ...] = ()
        self.form = form
        self._inv_freq = {kind: tensor.double() for kind, tensor in inv_freq.items()}
        self._scaling = scaling

    @classmethod
    def of(cls, module: nn.Module, form: Form) -> Self:
        """Takes the current frequencies of a transformers module; `turnings` is to be set later.

        Args:
            module: what the model calls for cosines and sines, with buffers named as transformers names them.
            form: of its results.
        """
        names = [name for name in frequency_names(module) if "original" not in name]
        by_kind = {name.removesuffix(_SUFFIX).removesuffix("_") or None: name for name in names}
        rotary = cls(
            {kind: getattr(module, name) for kind, name in by_kind.items()},
            {kind: getattr(module, name.replace(_SUFFIX, "attention_scaling"), 1.0) for kind, name in by_kind.items()},
            [],
            form,
        )
        rotary.stock = (module,)
        return rotary

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor] | Tensor:
        """Cosines and sines of positions [...] in this module's form, in the type of x; complex ones in float32."""
        scaling = self._scaling[layer_type]
        dtype = torch.float32 if self.form is Form.COMPLEX else x.dtype
        return self.form.of(*((part * scaling).to(dtype) for part in self._turn(position_ids, layer_type)))

    def frequencies(self, turning: Turning) -> tuple[Tensor, float]:
        """What `angles` are made of, for who computes them: float64 [pairs], angle per position; and the factor."""
        if turning.pairs is None:
            return torch.empty(0, dtype=torch.float64), 1.0
        return self._inv_freq[turning.kind], self._scaling[turning.kind]

    def angles(self, turning: Turning, positions: Tensor) -> tuple[Tensor, Tensor]:
        """How layers turn the pairs in their heads, in whichever layout.

        Args:
            turning: of the layers.
            positions: int64 [n].

        Returns:
            Cosines and sines, float32 [n, pairs]; there are no pairs without positions.
        """
        if turning.pairs is None:
            nothing = torch.empty(len(positions), 0, device=positions.device)
            return nothing, nothing
        scaling = self._scaling[turning.kind]
        cos, sin = ((part * scaling).float() for part in self._turn(positions, turning.kind))
        return cos, sin

    def rotation(self, layer: int, distances: Tensor) -> Rotation:
        """The rotation that moves a layer's vectors to positions further by `distances`.

        Args:
            layer: index of the layer.
            distances: int64 [n].
        """
        return self.rotation_of(self.turnings[layer], distances)

    def rotation_of(self, turning: Turning, distances: Tensor) -> Rotation:
        """The same for a given `Turning`."""
        if turning.pairs is None:
            nothing = torch.empty(len(distances), 1, 0, device=distances.device)
            return Rotation(nothing, nothing)
        cos, sin = (part[:, None].float() for part in self._turn(distances, turning.kind))
        return Rotation(turning.pairs.join(cos, cos), turning.pairs.join(-sin, sin), turning.pairs)

    def num_turned(self, turning: Turning) -> int:
        """How many elements of a head layers rotate, from the first one on."""
        return 0 if turning.pairs is None else 2 * len(self._inv_freq[turning.kind])

    @property
    def kinds(self) -> list[str | None]:
        """The names of the angles."""
        return list(self._inv_freq)

    def _turn(self, distances: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float64 [..., rotary_dim / 2]."""
        if self._inv_freq[kind].device != distances.device:
            self._inv_freq[kind] = self._inv_freq[kind].to(distances.device)
        angles = distances[..., None].double() * self._inv_freq[kind]
        return angles.cos(), angles.sin()


def installed(model: nn.Module) -> Rotary | None:
    """The model's `Rotary`, if it is the only rotary module and its turnings are known."""
    found = [module for module in model.modules() if isinstance(module, Rotary)]
    return found[0] if len(found) == 1 and found[0].turnings else None


def frequency_names(module: nn.Module) -> list[str]:
    """The buffers with the frequencies of a transformers module."""
    return [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_SUFFIX)]
