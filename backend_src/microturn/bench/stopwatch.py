"""Where the time of a step goes: stopwatches around the calls of a runner that only a benchmark has.

Nested spans, and the products once more by themselves: in a compiled layer nothing can be put around them. What is left
of the layers without products and attention is their norms, activations, rotations and the Python between them; what is
left of a step without the layers is planning, embedding, sampling and commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from microturn.layers.decoder import Attention, FusedDecoder


@dataclass
class Stopwatch:
    """Seconds since it was last set to zero.

    Attributes:
        products_s: in the same matrix products by themselves, the head's included; no part of the others.
        attention_s: in attention, writing new keys and values included.
        layers_s: in all layers and the head, products and attention included.
        num_tokens: that went through the layers.
        product_bytes: of the weights that the products have read.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    layers_s: float = 0.0
    num_tokens: int = 0
    product_bytes: int = 0


class TimedDecoder:
    """A decoder with a stopwatch in it; use it in its place.

    Args:
        decoder: of our layers.
        stopwatch: that runs.
    """

    def __init__(self, decoder: FusedDecoder, stopwatch: Stopwatch) -> None:
        self._decoder = decoder
        self._stopwatch = stopwatch

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor:
        """See `FusedDecoder`."""
        started_s = time.perf_counter()
        logits = self._decoder(hidden, positions, wanted, _TimedAttention(attention, self._stopwatch))
        ended_s = time.perf_counter()
        self._decoder.multiply(len(positions), len(wanted))
        self._stopwatch.products_s += time.perf_counter() - ended_s
        self._stopwatch.layers_s += ended_s - started_s
        self._stopwatch.num_tokens += len(positions)
        self._stopwatch.product_bytes += self._decoder.weight_bytes
        return logits


class _TimedAttention:
    """An `Attention` that is timed."""

    def __init__(self, attention: Attention, stopwatch: Stopwatch) -> None:
        self._attention = attention
        self._stopwatch = stopwatch

    def append_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        started_s = time.perf_counter()
        attended = self._attention.append_and_attend(layer, q, k, v, scale, window)
        self._stopwatch.attention_s += time.perf_counter() - started_s
        return attended
