"""How layers with different attention windows share the pages of one pool.

Layers with the same window are a *kind*. The layers of each kind are divided into *groups* of equal size, and a page
belongs to one group: it has one *slot* for each layer of a group. So all pages have the same size, whichever kind they
serve, and pages that layers with a short window release are free for all::

    18 layers, every sixth with full attention: two kinds, six groups of three

    slot              0         1         2
    full            layer 5  layer 11  layer 17      group 0
    window 512      layer 0   layer 1   layer 2      group 0     a page of 16 tokens: keys and values of these
                    layer 3   layer 4   layer 6      group 1     three layers, or of those three, or …
                      …         …         …            …

This is the idea of vLLM's hybrid KV cache manager. A group here is a KV cache group there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

# Each group costs a page list per session and a plan per step.
_MAX_GROUPS = 8


@dataclass(frozen=True)
class LayerShape:
    """The KV of one attention layer per token, and its window.

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
    """Layers with the same window.

    Attributes:
        window: positions visible to a query, itself included; None is all of them.
        num_groups: groups that the layers are divided into.
    """

    window: int | None = None
    num_groups: int = 1


@dataclass(frozen=True)
class LayerPlace:
    """Where the keys and values of one layer are: kind, group of that kind, and slot."""

    kind: int
    group: int
    slot: int


@dataclass(frozen=True)
class LayerGroups:
    """The layers of one model.

    Attributes:
        kinds: the one with the longest window first.
        places: of each layer, in the model's order.
        slots: the layer shapes that a page has room for.
    """

    kinds: tuple[LayerKind, ...]
    places: tuple[LayerPlace, ...]
    slots: tuple[LayerShape, ...]

    @property
    def num_groups(self) -> int:
        """Pages per page_size tokens while every layer keeps them."""
        return sum(kind.num_groups for kind in self.kinds)

    def session_pages(self, num_tokens: int, page_size: int, window_slack: int) -> int:
        """Pages that a session takes between two turns.

        Args:
            num_tokens: of its context.
            page_size: tokens in a page.
            window_slack: tokens that layers with a window keep beyond it for rewinds.
        """
        num_pages = 0
        for kind in self.kinds:
            kept = num_tokens
            if kind.window is not None:  # tokens outside of the window are released in whole pages
                kept = min(kept, kind.window - 1 + window_slack + page_size)
            num_pages += kind.num_groups * -(-kept // page_size)
        return num_pages

    @classmethod
    def of(cls, layers: Sequence[LayerShape]) -> Self:
        """Chooses the group size that leaves the fewest slots empty; among equal ones the largest.

        Layers of different shapes cannot share pages: such a model has one group.
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
        """All layers in one group with the longest window of any of them."""
        window = max((layer.window for layer in layers), key=_reach)
        places = (LayerPlace(0, 0, slot) for slot in range(len(layers)))
        return cls((LayerKind(window),), tuple(places), tuple(layers))


def _num_groups(counts: Counter[int | None], size: int) -> int:
    return sum(-(-count // size) for count in counts.values())


def _reach(window: int | None) -> float:
    return float("inf") if window is None else window
