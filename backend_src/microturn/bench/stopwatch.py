"""Times the parts of a step, by wrapping a runner's calls in benchmarks.

The spans are nested. The products are timed in a separate run, since they cannot be wrapped in a compiled layer. The
rest of the layers is norms, activations, rotations and Python between them; the rest of a step is planning, embedding,
sampling, commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from microturn.model.cpu.layers import Attention, FusedLayers


@dataclass
class Stopwatch:
    """Seconds since the last reset.

    Attributes:
        products_s: in the same matrix products run separately, including the head; not part of the others.
        attention_s: in attention, including writing new keys and values.
        layers_s: in all layers and the head, including products and attention.
        num_tokens: tokens of the pass.
        product_bytes: bytes of weights that the products read.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    layers_s: float = 0.0
    num_tokens: int = 0
    product_bytes: int = 0


class TimedDecoder:
    """A decoder with a stopwatch.

    Args:
        decoder: our layers.
        stopwatch: records the times.
    """

    def __init__(self, decoder: FusedLayers, stopwatch: Stopwatch) -> None:
        self._decoder = decoder
        self._stopwatch = stopwatch

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor:
        """See `FusedLayers`."""
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
    """An `Attention` with a stopwatch."""

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
