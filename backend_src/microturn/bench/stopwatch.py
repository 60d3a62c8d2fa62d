"""Times the parts of a step, by wrapping a runner's calls in benchmarks.

Products and attention are timed in separate runs, layer by layer, since nothing can be wrapped within compiled layers.
The rest of the layers is norms, activations and rotations, less what these runs' calls from Python take (some
microseconds a layer); the rest of a step is planning, embedding, sampling, commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from microturn.model.cpu.layers import FusedLayers
from microturn.model.step_attention import Attention


@dataclass
class Stopwatch:
    """Seconds since the last reset.

    Attributes:
        products_s: in the same matrix products run separately, including the head.
        attention_s: in the same attention run separately, including writing new keys and values.
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
        logits = self._decoder(hidden, positions, wanted, attention)
        ended_s = time.perf_counter()
        self._decoder.attend(len(positions), attention)
        attended_s = time.perf_counter()
        self._decoder.multiply(len(positions), len(wanted))
        self._stopwatch.products_s += time.perf_counter() - attended_s
        self._stopwatch.attention_s += attended_s - ended_s
        self._stopwatch.layers_s += ended_s - started_s
        self._stopwatch.num_tokens += len(positions)
        self._stopwatch.product_bytes += self._decoder.weight_bytes
        return logits

    @property
    def is_compiled(self) -> bool:
        return self._decoder.is_compiled

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes
