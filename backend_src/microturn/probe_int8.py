"""Decides at load whether a model runs with 8-bit weights: near the stock model, and the same in any company.

The layers have passed the probe in float32 before; what is new are the products. Knows nothing of how they are made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from microturn.batch import Batch, Row
from microturn.kv_tensors import KVTensors, LayerShape
from microturn.layers.decoder import FusedDecoder
from microturn.layers.int8_linear import FEW_ROWS, Int8Linear
from microturn.probe import stock_logits
from microturn.runner import ModelRunner

log = logging.getLogger(__name__)

# Root mean square of what rounding may change in logits, relative to their spread: SmolLM2-135M has 0.06, Gemma 3 270M
# 0.10, and a wrong scale of one product anywhere 0.3 or more.
TOLERANCE = 0.25
_PAGE_SIZE = 16
_LEN = 3 * FEW_ROWS


class Refused(Exception):
    """Why a model does not run with 8-bit weights."""


def int8_decoder(model: PreTrainedModel, layers: Sequence[LayerShape], exact: FusedDecoder | None) -> FusedDecoder:
    """The model's layers with weights of 8 bits, tried out.

    Args:
        model: is left as it is.
        layers: its layers' shapes.
        exact: the same layers in float32, as they have passed the probe; None where transformers' own have to run.

    Raises:
        Refused: when they cannot be made, or compute something else.
    """
    name = type(model).__name__
    if exact is None:
        raise Refused(f"{name} runs on transformers' layers")
    decoder = FusedDecoder(model, layers, Int8Linear)
    vocab_size = model.config.get_text_config().vocab_size
    ids, neighbour = torch.randint(vocab_size, (2, _LEN), generator=torch.Generator().manual_seed(0)).tolist()
    num_pages = _LEN // _PAGE_SIZE
    kv = KVTensors(layers, 2 * num_pages, _PAGE_SIZE)
    runner = ModelRunner(model, kv, use_native=True, decoder=decoder)
    pages, neighbour_pages = list(range(num_pages)), list(range(num_pages, 2 * num_pages))

    # Each piece by itself, then beside a piece that makes many rows of the few.
    cuts = [0, FEW_ROWS, FEW_ROWS + 1, 2 * FEW_ROWS + 2, _LEN]
    got = []
    for first, last in pairwise(cuts):
        row = Row(ids[first:last], first, pages)
        alone = runner.run(Batch([row]))[0]
        together = runner.run(Batch([Row(neighbour, 0, neighbour_pages), row]))[1]
        if not torch.equal(alone, together):
            raise Refused(f"logits of {name} with 8-bit weights change beside another session")
        got.append(alone)
    expected = stock_logits(model, ids)[[cut - 1 for cut in cuts[1:]]]
    deviation = float((torch.stack(got) - expected).square().mean().sqrt() / expected.std())
    log.info("probe: logits of %s with 8-bit weights deviate by %.1e", name, deviation)
    # Written so that NaN fails too.
    if not deviation <= TOLERANCE:
        raise Refused(f"logits of {name} with 8-bit weights deviate from the stock model's by {deviation:.2f}")
    return decoder
