"""Rotary position embeddings that stay exact however long a session lives.

A model's own module multiplies positions and frequencies in float32: at position 160,000 an angle is off by up to a
hundredth. Ours takes the module's place and its frequencies, and multiplies in float64.

Rotations add up (Su et al., 2021), so that a query that is turned back by a distance sees all keys so much nearer. That
is how tokens can move closer together without touching what is cached. Knows tensors; knows no rows and no pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_SUFFIX = "inv_freq"
# Kinds of scaling whose angles do not depend on how long the longest sequence of a batch is.
_STATIC = {"default", "linear", "llama3", "yarn", "proportional"}


@dataclass(frozen=True)
class Rotation:
    """Turns vectors.

    Attributes:
        cos: float32 [n, 1, rotary_dim].
        sin: the same; its first half is negative.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Turns float32 [n, heads, head_dim], the pairs of the first rotary_dim elements half of rotary_dim apart."""
        rotary_dim = self.cos.shape[-1]
        given = x[..., :rotary_dim]
        turned = torch.addcmul(given * self.cos, given.roll(rotary_dim // 2, -1), self.sin)
        return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


class Rotary(nn.Module):
    """The angles of a model's layers.

    Args:
        inv_freq: float32 [rotary_dim / 2], angle per position, by kind of layer.
        scaling: factor of cosines and sines, by kind of layer.
        kinds: of each layer; None where all are of one.
    """

    def __init__(
        self, inv_freq: Mapping[str | None, Tensor], scaling: Mapping[str | None, float], kinds: Sequence[str | None]
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self._inv_freq = {kind: tensor.double() for kind, tensor in inv_freq.items()}
        self._scaling = scaling

    @classmethod
    def of(cls, module: nn.Module, kinds: Sequence[str]) -> Self | None:
        """Reads a module of transformers; None where its angles are not those of fixed frequencies.

        Args:
            module: what the model calls for cosines and sines.
            kinds: the configuration's name for each layer.
        """
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_SUFFIX)]
        names = [name for name in names if "original" not in name]
        rope_type: Any = getattr(module, "rope_type", "default")
        rope_types = {rope_type} if isinstance(rope_type, str) else set(rope_type.values())
        if not names or not rope_types <= _STATIC:
            return None
        by_kind = {name.removesuffix(_SUFFIX).removesuffix("_") or None: name for name in names}
        return cls(
            {kind: getattr(module, name) for kind, name in by_kind.items()},
            {kind: getattr(module, name.replace(_SUFFIX, "attention_scaling"), 1.0) for kind, name in by_kind.items()},
            [None] * len(kinds) if None in by_kind else kinds,
        )

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., rotary_dim] of positions [...], in the type of x."""
        cos, sin = self._turn(position_ids, layer_type)
        scaling = self._scaling[layer_type]
        return (cos * scaling).to(x.dtype), (sin * scaling).to(x.dtype)

    def rotation(self, layer: int, distances: Tensor) -> Rotation:
        """Turns a layer's vectors on, as if each stood at a position further by a distance.

        Args:
            layer: index of the layer.
            distances: int64 [n].
        """
        cos, sin = (part[:, None] for part in self._turn(distances, self.kinds[layer]))
        first, second = sin.chunk(2, dim=-1)
        return Rotation(cos.float(), torch.cat((-first, second), dim=-1).float())

    def _turn(self, distances: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        if self._inv_freq[kind].device != distances.device:
            self._inv_freq[kind] = self._inv_freq[kind].to(distances.device)
        angles = distances[..., None].double() * self._inv_freq[kind]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def install(model: PreTrainedModel) -> None:
    """Puts ours in the place of the model's module, where we can read that one; else it stays."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [""] * int(config.num_hidden_layers)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.endswith(_SUFFIX) for buffer, _ in child.named_buffers(recurse=False)):
                rotary = Rotary.of(child, kinds)
                if rotary is not None:
                    setattr(parent, name, rotary)


def installed(model: PreTrainedModel) -> Rotary | None:
    """The model's, where it is ours and the only one."""
    found = [module for module in model.modules() if isinstance(module, Rotary)]
    return found[0] if len(found) == 1 else None
