"""Factors in a model's forward methods, where no module shows them: the probe finds those that are not known here."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from transformers import PreTrainedModel

# A transformers module, whose attributes are untyped.
_Module = Any


class Factors(NamedTuple):
    """What a model multiplies by before its layers and behind its head.

    Attributes:
        embeddings: factor of the embedded tokens, and of embeddings given in their place.
        logits: factor of the logits.
    """

    embeddings: float
    logits: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Reads a causal LM by the names that Granite has for them."""
        decoder: _Module = model.model
        divisor = getattr(model.config.get_text_config(), "logits_scaling", 1.0)
        return cls(float(getattr(decoder, "embedding_multiplier", 1.0)), 1 / float(divisor))


def residual_factor_of(layer: _Module) -> float:
    """The factor with which a layer adds what its attention and its feed-forward part give."""
    return float(getattr(layer, "residual_multiplier", 1.0))
