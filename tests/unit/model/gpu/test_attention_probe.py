"""FlashInfer's attention is compared with torch's for each kind of layer, and what it leaves out is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.layer_pages import LayerPages
from microturn.model.gpu import projection_kernel
from microturn.model.gpu.attention_probe import check_attention
from microturn.model.gpu.flashinfer_attention import FlashInferAttention
from microturn.model.gpu.glue import Projection, split_heads
from microturn.model.scores import Scores
from support import models, plain_flashinfer, projections, recorded_graphs

SHAPES = [LayerShape(2, 64, 40), LayerShape(2, 64), LayerShape(2, 64)]
SCORES = [
    Scores(64**-0.5, 40),
    Scores(64**-0.5),
    Scores(64**-0.5, None, 30.0, torch.tensor([20.0, 0.0, 24.0, 10.0])),  # as large as scores are
]


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "no GPU")


def check() -> None:
    model = models.with_served_heads("llama").to(torch.bfloat16)
    check_attention(model, SHAPES, SCORES, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        lambda of: replace(of, sink_logits=None),
        lambda of: replace(of, sink_logits=None if of.sink_logits is None else of.sink_logits.roll(1)),
        lambda of: replace(of, scale=of.scale * 1.1),
    ],
)
def test_scores_that_flashinfer_computes_otherwise_are_refused(
    change: Callable[[Scores], Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    original = FlashInferAttention.attend

    def attend(self: FlashInferAttention, layer: int, q: Tensor, of: Scores) -> Tensor:
        return original(self, layer, q, change(of))

    monkeypatch.setattr(FlashInferAttention, "attend", attend)
    with pytest.raises(InvalidArgument, match="FlashInfer's attention of LayerShape"):
        check()


@pytest.mark.parametrize("soft_cap", [None, 33.0])
def test_a_soft_cap_that_flashinfer_has_otherwise_is_refused(
    soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan

    def plan(*args: object, logits_soft_cap: float | None, **kwargs: object) -> None:
        original(*args, logits_soft_cap=logits_soft_cap and soft_cap, **kwargs)

    monkeypatch.setattr(plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    with pytest.raises(InvalidArgument, match="FlashInfer's attention of LayerShape"):
        check()


@pytest.mark.parametrize("length", [40, 4096])
def test_a_window_that_flashinfer_has_otherwise_is_refused(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one too, though no batch of the check is as long."""
    original = plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan

    def plan(*args: object, window_left: int, **kwargs: object) -> None:
        original(*args, window_left=-1 if window_left < 0 else window_left + 1, **kwargs)

    monkeypatch.setattr(plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    model = models.with_served_heads("llama").to(torch.bfloat16)
    shapes, scores = [LayerShape(2, 64, length)], [Scores(64**-0.5, length)]
    with pytest.raises(InvalidArgument, match="FlashInfer's attention of LayerShape"):
        check_attention(model, shapes, scores, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("shift", [None, 1])
def test_keys_that_are_not_written_or_not_where_they_belong_are_refused(
    shift: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(projection: Projection, pages: LayerPages, places: Tensor) -> Tensor:
        if shift is not None:
            return projections.plain_append(projection, pages, places.roll(shift, 0))
        return split_heads(projection)[0]

    monkeypatch.setattr(projection_kernel, "append_projection", append)
    with pytest.raises(InvalidArgument, match="FlashInfer's attention of LayerShape"):
        check()
