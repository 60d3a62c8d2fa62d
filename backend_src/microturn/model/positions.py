"""How far the positions of a model reach.

LongRoPE (Ding et al., 2024) has two sets of frequencies, and transformers takes the second one for the whole sequence
once that is longer than the model's original context: what a token is rotated by depends on what comes after it then,
and cached keys would be wrong. Up to that length angles are a function of the position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BY_LENGTH = ("longrope", "su")  # one under two names


def num_positions(get: Callable[[str], Any]) -> int | None:
    """The longest context in which a model's angles depend on positions alone; None where its config does not say.

    Args:
        get: returns an entry of the config, None if there is none.
    """
    trained = get("max_position_embeddings")
    rope = get("rope_parameters") or get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in _BY_LENGTH:
        trained = rope.get("original_max_position_embeddings") or get("original_max_position_embeddings") or trained
    return trained if isinstance(trained, int) and trained > 0 else None


def num_positions_of(model: Any) -> int | None:
    """The same of a transformers model."""
    config = model.config.get_text_config()
    return num_positions(lambda name: getattr(config, name, None))
