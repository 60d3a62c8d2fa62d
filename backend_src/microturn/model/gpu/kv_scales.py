"""The scales of keys and values in 8-bit floats: from a model's checkpoint, else measured at load.

Measured ones leave room for keys that are larger than those of the measurement. They are powers of two, which round
nothing. Machines that compute a little otherwise may find another one: then KV that one has saved is computed again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from microturn.model import paged_attention as paged
from microturn.model.batch import Batch
from microturn.model.gpu import float8
from microturn.model.gpu.published_scales import PublishedScales
from microturn.model.positions import num_positions_of
from microturn.model.probe_pages import SessionPages, new_pages, probe_len
from microturn.model.runner import ModelRunner
from microturn.model.scores import Scores
from microturn.model.step_attention import Attention

log = logging.getLogger(__name__)

# The largest measured element times this is the largest number at least.
_ROOM = 4.0


def kv_scales(model: PreTrainedModel, layers: Sequence[LayerShape], published: PublishedScales) -> list[LayerScales]:
    """The scales of each layer.

    Args:
        model: whose own layers run.
        layers: KV shape of each layer.
        published: of its checkpoint; those that are no positive numbers are measured.
    """
    attention = {name: module for name, module in model.named_modules() if hasattr(module, "layer_idx")}
    names = {paged.layer_of(attention[name]): name for of in published.kv for name in of if name in attention}
    given = [tuple(_usable(of.get(names.get(layer, ""))) for of in published.kv) for layer in range(len(layers))]
    num_given = sum(scale is not None for of_layer in given for scale in of_layer)
    log.info("%d of %d scales of KV come from the checkpoint, the others are measured", num_given, 2 * len(layers))
    if num_given == 2 * len(layers):
        return [LayerScales(*(scale or 1.0 for scale in of_layer)) for of_layer in given]
    measured = measured_scales(model, layers)
    return [
        LayerScales(*(known or found for known, found in zip(*of_layer, strict=True)))
        for of_layer in zip(given, measured, strict=True)
    ]


@torch.inference_mode()
def measured_scales(model: PreTrainedModel, layers: Sequence[LayerShape]) -> list[LayerScales]:
    """Those of the keys and values of some tokens, which are the same at each start."""
    kv = new_pages(model, layers, model.dtype, model.device)
    runner = _Measuring(model, kv)
    length = min(probe_len(layers), num_positions_of(model) or probe_len(layers))
    ids = torch.randint(runner.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    first = model.config.get_text_config().bos_token_id
    # The keys of the first token are often the largest, and those of one that begins a text.
    ids[0] = first if isinstance(first, int) else ids[0]
    runner.run(Batch([SessionPages.of(kv, range(kv.num_pages), length).row(ids, 0)]))
    return [LayerScales(*map(_scale_of, runner.largest[layer])) for layer in range(len(layers))]


class _Measuring(ModelRunner):
    """Runs a model's own layers, and remembers the largest element of each layer's keys and values."""

    def __init__(self, model: PreTrainedModel, kv: KVTensors) -> None:
        super().__init__(model, kv)
        self.largest: dict[int, tuple[float, float]] = {}

    def _attend(self, batch: Batch) -> Attention:
        return _MeasuredAttention(super()._attend(batch), self.largest)


class _MeasuredAttention:
    def __init__(self, attention: Attention, largest: dict[int, tuple[float, float]]) -> None:
        self._attention = attention
        self._largest = largest

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        self._largest[layer] = float(k.abs().max()), float(v.abs().max())
        return self._attention.append_and_attend(layer, q, k, v, scores)


def _scale_of(largest: float) -> float:
    """The power of two from which on elements so large have room."""
    return 2.0 ** math.ceil(math.log2(largest * _ROOM / float8.LARGEST)) if 0 < largest < math.inf else 1.0


def _usable(scale: float | None) -> float | None:
    return scale if scale is not None and 0 < scale < math.inf else None
