"""How a model's layers share the pages of one pool though some of them look back less far than others.

Layers that look equally far back are a *kind*. The layers of each kind are cut into *groups* of equally many, and a
page belongs to one group: it has room for as many layers as a group has, in its *slots*. So every page is as large as
any other, whichever kind it serves, and what layers with a short window give up is free for all::

    18 layers, every sixth of them sees all: two kinds, six groups of three

    slot              0         1         2
    sees all        layer 5  layer 11  layer 17      group 0
    window 512      layer 0   layer 1   layer 2      group 0     a page of 16 tokens: keys and values of these
                    layer 3   layer 4   layer 6      group 1     three layers, or of those three, or …
                      …         …         …            …

This is the idea of vLLM's hybrid KV cache manager. Knows layers and counts; knows no pages and no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

# Each group costs every session a list of pages, and every step a plan.
_MAX_GROUPS = 8


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token, and how far back it looks.

    Attributes:
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        window: positions visible to a query, itself included; None is all of them.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class LayerKind:
    """Layers that look equally far back.

    Attributes:
        window: positions visible to a query, itself included; None is all of them.
        num_groups: groups that the layers are cut into.
    """

    window: int | None = None
    num_groups: int = 1


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer keeps its keys and values: in pages of which kind, of which of its groups, and in which slot."""

    kind: int
    group: int
    slot: int


@dataclass(frozen=True)
class LayerGroups:
    """The layers of one model.

    Attributes:
        kinds: the one that looks back furthest first.
        places: of each layer, in the model's order.
        slots: what a page has room for.
    """

    kinds: tuple[LayerKind, ...]
    places: tuple[LayerPlace, ...]
    slots: tuple[LayerShape, ...]

    @property
    def num_groups(self) -> int:
        """Pages that the same tokens take while every layer keeps them."""
        return sum(kind.num_groups for kind in self.kinds)

    @classmethod
    def of(cls, layers: Sequence[LayerShape]) -> Self:
        """Groups that leave the fewest slots empty; of such the largest.

        Layers that keep differently much per token cannot take each other's pages: they stay one group.
        """
        counts = Counter(layer.window for layer in layers)
        sizes = [size for size in range(1, len(layers) + 1) if _num_groups(counts, size) <= _MAX_GROUPS]
        if not sizes or len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
            return cls.one(layers)
        size = min(sizes, key=lambda size: (size * _num_groups(counts, size), -size))
        windows = sorted(counts, key=_reach, reverse=True)
        places, num_seen = [], Counter[int | None]()
        for layer in layers:
            group, slot = divmod(num_seen[layer.window], size)
            places.append(LayerPlace(windows.index(layer.window), group, slot))
            num_seen[layer.window] += 1
        kinds = (LayerKind(window, -(-counts[window] // size)) for window in windows)
        return cls(tuple(kinds), tuple(places), tuple(layers[:size]))

    @classmethod
    def one(cls, layers: Sequence[LayerShape]) -> Self:
        """All layers in one group, which keeps what any of them sees."""
        window = max((layer.window for layer in layers), key=_reach)
        places = (LayerPlace(0, 0, slot) for slot in range(len(layers)))
        return cls((LayerKind(window),), tuple(places), tuple(layers))


def _num_groups(counts: Counter[int | None], size: int) -> int:
    return sum(-(-count // size) for count in counts.values())


def _reach(window: int | None) -> float:
    return float("inf") if window is None else window
