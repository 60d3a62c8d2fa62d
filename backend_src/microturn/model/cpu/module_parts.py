"""What a transformers module consists of: architectures are recognised by that, and not by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def children_of(module: Any) -> set[str]:
    """The names of a module's parts, without those that do nothing in inference."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def other_parts(what: str, module: Any, *known: set[str]) -> Iterator[str]:
    """How a module's parts differ from the nearest of those that are known."""
    parts = children_of(module)
    nearest = min(known, key=lambda names: len(names ^ parts))
    lacks, more = sorted(nearest - parts), sorted(parts - nearest)
    told = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(more)} besides"] * bool(more)
    if told:
        yield f"{what} {' and '.join(told)}"
