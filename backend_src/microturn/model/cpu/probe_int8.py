"""Checks at load whether a model runs with 8-bit weights: as the stock model that rounds alike, in any batch.

The layers have passed the probe in float32 before, kernel by kernel; the products are new, and that all layers run in
one call. The effect of rounding on quality is not checked here but measured by `make bench-weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import dequantize, quantize
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.cpu.feed_forward import stacks_of
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.int8_products import TILE_ROWS
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.rotation import block_of, rotate
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.runner import ModelRunner
from microturn.model.stock import stock_logits

log = logging.getLogger(__name__)

# Allowed root mean square of the logits' difference, relative to their spread. A float's last bit decides which of two
# integers an input becomes, and that changes those behind it: up to 0.1 was measured with SmolLM2-135M.
TOLERANCE = 0.3
_PAGE_SIZE = 16
_LEN = 96
# Of a weight that is rounded, for little memory besides: a head has many more.
_ROWS_AT_ONCE = 4096


class Refused(Exception):
    """The model does not run with 8-bit weights; the argument is the reason."""


def int8_decoder(
    model: PreTrainedModel, layers: Sequence[LayerShape], exact: FusedLayers | None, layout: PageLayout
) -> FusedLayers:
    """The model's layers with 8-bit weights, checked.

    Args:
        model: not changed.
        layers: its layers' shapes.
        exact: the same layers in float32, checked; None if transformers' own layers are used.
        layout: of the pages, which says what computes the attention.

    Raises:
        Refused: they cannot be created, or compute something else.
    """
    name = type(model).__name__
    if exact is None:
        raise Refused(f"{name} runs on transformers' layers")
    decoder = FusedLayers(model, layers, Int8Linear)
    vocab_size = model.config.get_text_config().vocab_size
    ids, neighbour = torch.randint(vocab_size, (2, _LEN), generator=torch.Generator().manual_seed(0)).tolist()
    num_pages = _LEN // _PAGE_SIZE
    kv = KVTensors(layers, 2 * num_pages, _PAGE_SIZE, layout=layout)
    runner = ModelRunner(model, kv, decoder=decoder)
    pages, neighbour_pages = list(range(num_pages)), list(range(num_pages, 2 * num_pages))

    # Full and partial tiles of rows, each alone, then batched with another piece.
    cuts = [0, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS + 3, _LEN]
    got = []
    for first, last in pairwise(cuts):
        row = Row(ids[first:last], first, pages)
        alone = runner.run(Batch([row]))[0]
        together = runner.run(Batch([Row(neighbour, 0, neighbour_pages), row]))[1]
        if not torch.equal(alone, together):
            raise Refused(f"logits of {name} with 8-bit weights change beside another session")
        got.append(alone)
    expected = _rounded_logits(model, ids)[[cut - 1 for cut in cuts[1:]]]
    deviation = float((torch.stack(got) - expected).square().mean().sqrt() / expected.std())
    log.info("probe: logits of %s with 8-bit weights deviate by %.1e", name, deviation)
    # Written so that NaN fails too.
    if not deviation <= TOLERANCE:
        raise Refused(
            f"logits of {name} with 8-bit weights deviate from the stock model's, rounded alike, by {deviation:.1e} "
            f"(allowed: {TOLERANCE:.0e})"
        )
    return decoder


def _rounded_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits [n, vocab_size] of the stock model with rounded weights and inputs of linear modules and experts."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        rounded = _rounded(x) / block_of(weight.shape[1])
        parts = torch.split(as_stored(weight), _ROWS_AT_ONCE)
        return torch.cat([nn.functional.linear(rounded, _rounded(rows)) for rows in parts], dim=-1)

    def multiply_rounded(module: nn.Linear, given: tuple[Tensor, ...], _: Tensor) -> Tensor:
        out = product(given[0], module.weight)
        return out if module.bias is None else out + module.bias

    def feed_experts(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> Tensor:
        x, chosen, factors = given
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, up = product(x[rows], module.gate_up_proj[expert]).chunk(2, dim=-1)  # type: ignore[index]
            result = product(module.act_fn(gate) * up, module.down_proj[expert])  # type: ignore[index, operator]
            out[rows] += result * factors[rows, ranks, None]
        return out

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(multiply_rounded) for module in linears]
    experts = [module for module in model.modules() if stacks_of(module)]
    hooks += [module.register_forward_hook(feed_experts) for module in experts]
    try:
        return stock_logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(x: Tensor) -> Tensor:
    """Vectors [..., n], rotated and rounded to 8 bits."""
    rows = x.detach().float().flatten(0, -2).contiguous()
    rotated = torch.empty(rows.shape)
    rotate(rows.numpy(), rotated.numpy())
    return dequantize(*quantize(rotated)).view(x.shape)
