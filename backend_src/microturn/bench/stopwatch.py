"""Where the time of a step goes: stopwatches around the calls of a runner that only a benchmark has.

Three nested spans. What is left of the layers without products and attention is their norms, activations, rotations and
the Python between them; what is left of a step without the layers is planning, embedding, sampling and commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from microturn.layers.decoder import Attention, FusedDecoder
from microturn.layers.linear import Product


@dataclass
class Stopwatch:
    """Seconds since it was last set to zero.

    Attributes:
        products_s: in matrix products, the head's included.
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
        decoder: its products are timed from now on, for good.
        stopwatch: that runs.
    """

    def __init__(self, decoder: FusedDecoder, stopwatch: Stopwatch) -> None:
        self._decoder = decoder
        self._stopwatch = stopwatch
        decoder.wrap_products(lambda product: _TimedProduct(product, stopwatch))

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor:
        """See `FusedDecoder`."""
        started_s = time.perf_counter()
        logits = self._decoder(hidden, positions, wanted, _TimedAttention(attention, self._stopwatch))
        self._stopwatch.layers_s += time.perf_counter() - started_s
        self._stopwatch.num_tokens += len(positions)
        return logits


class _TimedProduct:
    """A `Product` that is timed."""

    def __init__(self, product: Product, stopwatch: Stopwatch) -> None:
        self._product = product
        self._stopwatch = stopwatch
        self.num_out = product.num_out
        self.num_bytes = product.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        started_s = time.perf_counter()
        self._product(x, out)
        self._stopwatch.products_s += time.perf_counter() - started_s
        self._stopwatch.product_bytes += self._product.num_bytes
        return out


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
