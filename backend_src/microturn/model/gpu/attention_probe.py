"""Compares FlashInfer's kernels and ours with torch's on random keys, in the types and shapes that they will serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.gpu.flashinfer_attention import AttentionShape, FlashInferAttention, new_workspace
from microturn.model.gpu.glue import Projection, split_heads
from microturn.model.paged_attention import PagedAttention
from microturn.model.scores import Scores

log = logging.getLogger(__name__)

# Norm of the difference relative to that of torch's result in float32: bfloat16 has 8 bits of precision.
TOLERANCE = 2e-2
_PAGE_SIZE = 16
_NUM_PAGES = 40
_MOST_WINDOW = 40
# Of pages in 8-bit floats: each is another, and they leave random numbers as they are.
_SCALES = LayerScales(0.5, 2.0)


@torch.inference_mode()
def check_attention(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    scores: Sequence[Scores],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    """Compares every shape and kind of scores: decode steps, appends, first prompts, and moved sinks.

    Args:
        model: of the layers.
        layers: KV shape of each layer; `scores` likewise.
        dtype: of the queries.
        kv_dtype: of the pages.

    Raises:
        InvalidArgument: FlashInfer's results differ.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(0)
    workspace = new_workspace(AttentionShape.of(model, layers, scores, dtype), device)
    distinct = {(layer, of.soft_cap, of.sink_logits is None): of for layer, of in zip(layers, scores, strict=True)}
    for (layer, *_), of in distinct.items():
        if layer.window is not None:  # one that the batches go beyond; its length is no matter to the kernel
            layer = replace(layer, window=min(layer.window, _MOST_WINDOW))
            of = replace(of, window=layer.window)
        shape = AttentionShape.of(model, [layer], [of], dtype)
        float8 = [_SCALES] if kv_dtype == torch.float8_e4m3fn else None
        kv = KVTensors([layer], _NUM_PAGES + 1, _PAGE_SIZE, kv_dtype, device, float8=float8)
        keys = torch.randn(kv.layers[0].elements.shape, generator=generator, device=device)
        kv.layers[0].elements.copy_(keys)
        for batch in _batches(with_moved_sinks=shape.rotary is not None and layer.window is None):
            projection = _projection(shape, batch.num_tokens, of, generator)
            q, k, v = split_heads(projection)
            before = kv.layers[0].elements.clone()
            expected = PagedAttention(batch, kv, rotary=shape.rotary).append_and_attend(0, q, k, v, of).float()
            written = kv.layers[0].elements.clone()
            kv.layers[0].elements.copy_(before)
            attention = FlashInferAttention(shape, kv, workspace, batch.num_tokens)
            attention.plan(batch)
            queries = attention.append_projection(0, projection)
            got = attention.append_and_attend(0, q, k, v, of) if queries is None else attention.attend(0, queries, of)
            deviation = float((got.float() - expected).norm() / expected.norm())
            log.info("probe: FlashInfer's attention of %s deviates by %.1e", layer, deviation)
            # Written so that NaN fails too.
            if not deviation <= TOLERANCE or not _same_bits(kv.layers[0].elements[:-1], written[:-1]):
                raise InvalidArgument(
                    f"FlashInfer's attention of {layer} deviates from torch's by {deviation:.1e} (allowed: "
                    f"{TOLERANCE:.0e}) on {torch.cuda.get_device_name(device)}: set attention=torch"
                )


def _projection(shape: AttentionShape, num_tokens: int, scores: Scores, generator: torch.Generator) -> Projection:
    """Random heads, which quarter turns leave exact: whatever rotates them, keys are the same to the bit."""
    device, (layer,) = generator.device, shape.layers
    size = num_tokens, shape.num_heads + 2 * layer.num_kv_heads, layer.head_dim
    qkv = torch.randn(size, generator=generator, device=device)
    qkv[:, : shape.num_heads] *= scores.soft_cap or 1.0  # so that scores are as large as their cap
    quarters = torch.randint(4, (num_tokens, layer.head_dim // 2), generator=generator, device=device)
    cos, sin = (torch.tensor(part, device=device)[quarters] for part in ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]))
    return Projection(qkv.to(shape.dtype), None, None, (cos, sin, False), shape.num_heads, layer.num_kv_heads)


def _batches(*, with_moved_sinks: bool) -> list[Batch]:
    """Batches of rows with pages out of order; the last batch has only decode rows."""
    pages = list(reversed(range(_NUM_PAGES)))
    append = [
        _row(1, 100, pages[:7]),
        _row(17, 40, pages[7:11]),
        _row(50, 0, pages[11:15]),
        _row(1, 0, pages[15:16]),
    ]
    decode = [_row(1, 300, pages[:19]), _row(1, 16, pages[19:21]), _row(1, 31, pages[21:23])]
    moved = Row([0] * 3, 1060, pages[30:34], num_sinks=_PAGE_SIZE, num_evicted=1008)
    return [Batch([*append, moved] if with_moved_sinks else append), Batch(decode)]


def _row(num_tokens: int, position: int, pages: Sequence[int]) -> Row:
    return Row([0] * num_tokens, position, pages)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
