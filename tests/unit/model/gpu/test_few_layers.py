"""A model's first layers stand for all: which are alike, and what a check of some says of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.model import products, rotary
from microturn.model.cpu.weights import NotKnown
from microturn.model.gpu.few_layers import FewLayers, Kinds, check_few_layers
from microturn.model.gpu.layers import TorchLayers
from microturn.model.rotary import Layout, Turning
from microturn.model.tracing import trace, trace_layers
from support import models
from support.oracle import stock_logits

IDS = [5, 200, 17, 3, 88, 41]


def deep(monkeypatch: pytest.MonkeyPatch, build: Callable[[], PreTrainedModel], times: int = 4) -> PreTrainedModel:
    """A model of `models` with its layers several times over, in bfloat16 as it is served."""
    for name, of in list(vars(models).items()):
        if isinstance(of, type) and name.endswith("Config"):
            monkeypatch.setattr(models, name, lambda *, _of=of, **shape: _of(**_repeated(shape, times)))
    return as_served(build())


def as_served(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def _repeated(shape: dict[str, Any], times: int) -> dict[str, Any]:
    num_layers = shape["num_hidden_layers"]
    of_layers = {name: of * times for name, of in shape.items() if isinstance(of, list) and len(of) == num_layers}
    return {**shape, **of_layers, "num_hidden_layers": times * num_layers}


def kinds_of(model: PreTrainedModel) -> Kinds:
    return Kinds.of(model, *trace(model))


def checked(model: PreTrainedModel) -> FewLayers:
    return check_few_layers(model, *trace(model), max_tokens=64)[1]


@pytest.mark.parametrize(
    ("build", "num_layers", "counterparts"),
    [
        (models.llama, 4, [0] * 12),
        (models.sliding_window, 4, [0, 1, 0] * 4),
        (models.soft_caps, 4, [0, 1] * 6),
        (models.no_positions, 4, [0, 1, 0] * 4),
        (models.positions_in_windows, 4, [0, 1, 0] * 4),
        (models.experts, 4, [0] * 12),
        (models.experts_in_some_layers, 4, [0, 1] + [0] * 10),
        (models.recurrent, 4, [0] * 4),
    ],
)
def test_layers_that_compute_alike_are_of_a_kind(
    build: Callable[[], PreTrainedModel], num_layers: int, counterparts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = kinds_of(deep(monkeypatch, build))
    assert (kinds.num_layers, kinds.is_whole, list(kinds.counterparts)) == (num_layers, False, counterparts)


def test_layers_are_taken_up_to_the_first_of_the_last_kind() -> None:
    layer_types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    config = models.Gemma3TextConfig(
        **{**models._COMMON, "num_hidden_layers": 12, "sliding_window": 20, "layer_types": layer_types},
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = models.build(models.Gemma3ForCausalLM, config)
    kinds = kinds_of(model)
    assert (kinds.num_layers, list(kinds.counterparts)) == (6, [0, 0, 0, 0, 0, 5] * 2)
    few = FewLayers.of(as_served(model), 6)
    assert [layer.window for layer in few.layers] == [20] * 5 + [None]
    assert few.model.config.layer_types == layer_types[:6]
    assert len(model.model.layers) == len(model.config.layer_types) == 12


def test_a_part_that_one_layer_alone_has_makes_it_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(monkeypatch, models.llama)
    model.model.layers[9].mlp.act_fn = torch.nn.GELU()
    assert kinds_of(model).num_layers == 10
    model.model.layers[9].self_attn.scaling *= 1.5
    model.model.layers[11].self_attn.scaling *= 1.5
    assert kinds_of(model).is_whole


def test_a_small_model_is_taken_as_a_whole() -> None:
    kinds = kinds_of(models.sliding_window())
    assert (kinds.num_layers, kinds.is_whole) == (3, True)


@pytest.mark.parametrize("build", [*models.FAST, models.experts, models.short_convolutions])
def test_a_check_of_few_layers_finds_how_all_of_them_rotate(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep(monkeypatch, build)
    monkeypatch.undo()
    exact = rotary.installed(build())
    few = checked(model)
    assert len(few.model.model.layers) == 4
    found = rotary.installed(model)
    assert list(found.turnings) == list(exact.turnings) * 4
    for kind, frequencies in exact._inv_freq.items():
        assert torch.equal(found._inv_freq[kind], frequencies)


def test_the_layers_are_the_served_ones_in_float32_and_those_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(monkeypatch, models.grouped_heads)
    before = stock_logits(model, IDS)
    few = checked(model)
    assert torch.equal(stock_logits(model, IDS), before)
    served = dict(model.named_parameters())
    for name, parameter in few.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, served[name].float())
    assert {parameter.dtype for parameter in served.values()} == {torch.bfloat16}


def test_a_layer_that_rotates_otherwise_and_does_not_tell_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All layers are checked then."""
    model = deep(monkeypatch, models.llama, times=2)
    attention = model.model.layers[5].self_attn

    def forward(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        unturned = torch.ones_like(cos), torch.zeros_like(sin)
        return type(self).forward(self, hidden_states, position_embeddings=unturned, **kwargs)

    attention.forward = MethodType(forward, attention)
    assert kinds_of(model).num_layers == 4
    with caplog.at_level(logging.WARNING):
        few = checked(model)
    assert "all layers of LlamaForCausalLM are checked, in float32: layers are unlike the first ones" in caplog.text
    assert len(few.model.model.layers) == 6
    halves = Turning(None, Layout.HALVES)
    assert list(rotary.installed(model).turnings) == [halves] * 5 + [Turning(None, None)]


def test_a_later_layer_that_is_not_known_leaves_all_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(monkeypatch, models.llama, times=2)
    layers, scores = trace(model)

    def refuse(of: PreTrainedModel, _shapes: object) -> None:
        if len(of.model.layers) == 6:
            raise NotKnown("its last layer is another")

    monkeypatch.setattr(TorchLayers, "require_known", staticmethod(refuse))
    found, _ = check_few_layers(model, layers, scores, max_tokens=64)
    assert (found.decoder, found.no_fused_reason) == (None, "its last layer is another")
    assert found.accepts_embeds
    assert found.no_window_reason is None


def held_bytes(model: PreTrainedModel) -> int:
    storages = {of.untyped_storage().data_ptr(): of.untyped_storage().nbytes() for of in model.parameters()}
    return sum(storages.values())


def test_fusing_never_holds_more_than_one_layer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(monkeypatch, models.grouped_heads)
    layers, before = trace_layers(model), held_bytes(model)
    most = 0
    stack = products.stacked

    def stacked(modules: Any) -> Any:
        nonlocal most
        made = stack(modules)
        most = max(most, held_bytes(model) + made[0].nbytes - before)
        return made

    monkeypatch.setattr(products, "stacked", stacked)
    decoder = TorchLayers.of(model, layers)
    assert held_bytes(model) == before
    largest = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert 0 < most < largest
    qkv = decoder._layers[7].qkv.weight
    assert model.model.layers[7].self_attn.v_proj.weight.untyped_storage().data_ptr() == qkv.data_ptr()
