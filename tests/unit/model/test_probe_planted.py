"""The check at load is tested itself: a mistake of ours of each kind must be found before a token is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from microturn.errors import InvalidArgument
from microturn.kv.page_layout import PageLayout
from microturn.model import paged_attention as paged
from microturn.model import rotary_fit, runner
from microturn.model.batch import Batch
from microturn.model.cpu import layers, weights
from microturn.model.cpu.factors import Factors
from microturn.model.cpu.weights import RMSNorm
from microturn.model.paged_attention import PagedAttention
from microturn.model.probe import check_model
from microturn.model.probe_attention import UnlikeOurs, check_attention
from microturn.model.rotary import Form, Layout, Turning, installed
from microturn.model.scores import Scores
from microturn.model.tracing import trace_layers
from support import models
from support.models import build

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}

Plant = Callable[[pytest.MonkeyPatch], None]


def grouped() -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**SHAPE))


def cohere() -> PreTrainedModel:
    return build(CohereForCausalLM, CohereConfig(**SHAPE))


def cohere2() -> PreTrainedModel:
    return build(Cohere2ForCausalLM, Cohere2Config(**LAYERS, **SHAPE))


def soft_caps() -> PreTrainedModel:
    """Small weights: the scores of a short text stay far below its cap."""
    return build(Gemma2ForCausalLM, Gemma2Config(head_dim=16, **{**SHAPE, "initializer_range": 0.02}))


def sink_logits() -> PreTrainedModel:
    return build(GptOssForCausalLM, GptOssConfig(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **SHAPE))


def check(model: PreTrainedModel) -> Any:
    return check_model(model, trace_layers(model), PageLayout.PANELS)


def _change_attention(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    original = PagedAttention.append_and_attend

    def append_and_attend(self: PagedAttention, *args: Any) -> Tensor:
        return original(self, *change(*args))

    patch.setattr(PagedAttention, "append_and_attend", append_and_attend)


def _change_scores(patch: pytest.MonkeyPatch, change: Callable[[Scores], Scores]) -> None:
    _change_attention(patch, lambda *args: (*args[:-1], change(args[-1])))


def _scale_of_a_head_one_wider(patch: pytest.MonkeyPatch) -> None:
    _change_scores(patch, lambda of: replace(of, scale=(of.scale**-2 + 1) ** -0.5))


def _scale_left_out(patch: pytest.MonkeyPatch) -> None:
    _change_scores(patch, lambda of: replace(of, scale=1.0))


def _last_element_of_a_head_left_out(patch: pytest.MonkeyPatch) -> None:
    def change(layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Any, ...]:
        v = v.clone()
        v[..., -1] = 0
        return layer, q, k, v, scores

    _change_attention(patch, change)


def _heads_of_another_group(patch: pytest.MonkeyPatch) -> None:
    _change_attention(patch, lambda layer, q, k, v, scores: (layer, q, k.flip(1).contiguous(), v, scores))


def _mask_hides_what_is_far_back(patch: pytest.MonkeyPatch) -> None:
    _change_scores(patch, lambda of: replace(of, window=60 if of.window is None else of.window))


def _position_off_by_one_in_later_turns(patch: pytest.MonkeyPatch) -> None:
    original = runner.positions_of

    def positions_of(batch: Batch) -> Tensor:
        shift = torch.cat([torch.full((len(row.token_ids),), int(row.position > 0)) for row in batch.rows])
        return original(batch) + shift

    patch.setattr(runner, "positions_of", positions_of)


def _positions_that_end_early(patch: pytest.MonkeyPatch) -> None:
    """By one only, at the far end of a context alone."""
    original = runner.positions_of
    patch.setattr(runner, "positions_of", lambda batch: original(batch).where(original(batch) < 1023, 1022))


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize(
    "plant",
    [
        _scale_of_a_head_one_wider,
        _scale_left_out,
        _last_element_of_a_head_left_out,
        _heads_of_another_group,
        _mask_hides_what_is_far_back,
        _position_off_by_one_in_later_turns,
        _positions_that_end_early,
    ],
)
def test_what_our_attention_and_positions_get_wrong_is_refused(
    plant: Plant, layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grouped()
    layers = trace_layers(model)
    check_model(model, layers, layout)
    plant(monkeypatch)
    with pytest.raises(InvalidArgument, match=r"cannot be served: its logits .* deviate"):
        check_model(model, layers, layout)


@pytest.mark.parametrize("build_model", [cohere, cohere2])
def test_interleaved_pairs_taken_for_halves_are_refused(
    build_model: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohere's models were served like that: the check compared them with themselves, ours in place."""
    assert check(build_model()).no_window_reason is None
    monkeypatch.setattr(rotary_fit, "_does_the_same", lambda *_: True)
    model = build_model()
    assert model.model.rotary_emb.form is Form.HALVES
    with pytest.raises(InvalidArgument, match="cannot be served: its logits in several turns deviate"):
        check(model)


@pytest.mark.parametrize("what", ["frequencies", "scaling"])
def test_rotary_scaling_left_out_is_refused(what: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
    model = build(LlamaForCausalLM, LlamaConfig(rope_parameters=rope, **SHAPE))
    check(model)
    rotary = installed(model)
    assert rotary is not None
    if what == "scaling":
        rotary._scaling = {None: 1.0}
    else:
        rotary._inv_freq = {None: 10_000.0 ** -(torch.arange(0, 16, 2).double() / 16)}
    with pytest.raises(InvalidArgument, match="cannot be served: its logits in several turns deviate"):
        check(model)


def _no_cap(of: Scores) -> Scores:
    return replace(of, soft_cap=None)


def _no_sink_logits(of: Scores) -> Scores:
    return replace(of, sink_logits=None)


@pytest.mark.parametrize(
    ("build_model", "change"),
    [
        (soft_caps, _no_cap),
        (soft_caps, lambda of: replace(of, soft_cap=of.soft_cap * 1.05)),
        (sink_logits, _no_sink_logits),
        (sink_logits, lambda of: replace(of, sink_logits=of.sink_logits + 0.1)),
        (sink_logits, lambda of: replace(of, sink_logits=of.sink_logits.roll(1))),
    ],
)
def test_scores_that_are_not_ours_are_refused_though_we_forget_an_argument(
    build_model: Callable[[], PreTrainedModel], change: Callable[[Scores], Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model()
    check(model)
    original = paged.scores_of
    monkeypatch.setattr(paged, "scores_of", lambda *args: change(original(*args)))
    with pytest.raises(InvalidArgument, match="layer 0 attends otherwise than by a softmax of scaled products"):
        check(model)


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize(
    ("build_model", "change"), [(models.soft_caps, _no_cap), (sink_logits, _no_sink_logits)], ids=["cap", "sinks"]
)
def test_scores_that_our_kernels_compute_otherwise_are_refused(
    build_model: Callable[[], PreTrainedModel],
    change: Callable[[Scores], Scores],
    layout: PageLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model()
    _change_scores(monkeypatch, change)
    with pytest.raises(InvalidArgument, match="cannot be served: its logits in several turns deviate"):
        check_model(model, trace_layers(model), layout)


def test_logits_whose_cap_is_left_out_leave_the_layers_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.soft_caps()
    monkeypatch.setattr(layers, "soft_cap_of_logits", lambda _: None)
    assert check(model).decoder is None


def _without(name: str) -> Plant:
    original = Factors.of
    return lambda patch: patch.setattr(Factors, "of", lambda model: original(model)._replace(**{name: 1.0}))


@pytest.mark.parametrize(
    "plant",
    [
        _without("embeddings"),
        _without("logits"),
        lambda patch: patch.setattr(weights, "residual_factor_of", lambda _: 1.0),
    ],
    ids=["embeddings", "logits", "residual"],
)
def test_a_factor_that_is_left_out_leaves_the_layers_to_transformers(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.factors()
    assert check(model).decoder is not None
    plant(monkeypatch)
    assert check(model).decoder is None


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_is_refused_however_long(by: int) -> None:
    """One of 600 tokens is too long to be walked through at load."""
    for window in (40, 600):
        model = build(MistralForCausalLM, MistralConfig(sliding_window=window, **SHAPE))
        layers = trace_layers(model)
        check_attention(model, layers)
        with pytest.raises(UnlikeOurs, match=f"over the last {window + by} tokens"):
            check_attention(model, [replace(layer, window=window + by) for layer in layers])


def test_a_window_off_by_one_in_our_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.sliding_window()
    layers = trace_layers(model)
    _change_scores(monkeypatch, lambda of: replace(of, window=None if of.window is None else of.window + 1))
    with pytest.raises(InvalidArgument, match="cannot be served: its logits in several turns deviate"):
        check_model(model, layers, PageLayout.PANELS)


def test_layers_that_look_at_chunks_are_refused_though_a_chunk_is_longer_than_any_text_of_the_check() -> None:
    config = Llama4TextConfig(
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        attention_chunk_size=256,
        no_rope_layers=[1, 0],
        **{**SHAPE, "pad_token_id": 0},
    )
    with pytest.raises(InvalidArgument, match="layer 0 attends otherwise"):
        check(build(Llama4ForCausalLM, config))


def test_a_norm_s_gain_taken_less_one_leaves_the_layers_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.sliding_window()
    layers = trace_layers(model)
    original = RMSNorm.of.__func__

    def of(cls: type[RMSNorm], module: Any) -> RMSNorm:
        norm: RMSNorm = original(cls, module)
        norm.gain = norm.gain - 1
        return norm

    monkeypatch.setattr(RMSNorm, "of", classmethod(of))
    assert check_model(model, layers, PageLayout.PANELS).decoder is None


def _sinks_moved_one_too_far(patch: pytest.MonkeyPatch, _: PreTrainedModel) -> None:
    original = PagedAttention._rotation
    patch.setattr(PagedAttention, "_rotation", lambda self, layer, by: original(self, layer, by + by.sign()))


def _layers_turned_that_know_no_positions(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    rotary = installed(model)
    assert rotary is not None
    assert Turning(None, None) in rotary.turnings
    patch.setattr(rotary, "turnings", [Turning(None, Layout.INTERLEAVED)] * 2)


def _pairs_taken_for_halves(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    patch.setattr(installed(model), "turnings", [Turning(None, Layout.HALVES)] * 2)


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize(
    "plant", [_sinks_moved_one_too_far, _layers_turned_that_know_no_positions, _pairs_taken_for_halves]
)
def test_what_is_wrong_behind_eviction_leaves_no_window(
    plant: Callable[[pytest.MonkeyPatch, PreTrainedModel], None], layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cohere2()
    layers = trace_layers(model)
    assert check_model(model, layers, layout).no_window_reason is None
    plant(monkeypatch, model)
    reason = check_model(model, layers, layout).no_window_reason
    assert reason is not None
    assert "behind 16000000 evicted tokens deviate" in reason
