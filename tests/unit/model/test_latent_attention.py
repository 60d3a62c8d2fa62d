"""Latent attention: the pages have one vector of a token for all heads, and the model computes what it did before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KV_DTYPES, KVTensors
from microturn.model import latent_attention
from microturn.model.batch import Batch, Row
from microturn.model.cpu import loading
from microturn.model.probe import check_model
from microturn.model.runner import ModelRunner, load_model, read_model
from microturn.model.stock import stock_logits
from microturn.model.tracing import trace_layers
from microturn.settings import Settings
from support.families import write_family

pytestmark = pytest.mark.usefixtures("one_thread")

RANK, ROTATED, NUM_HEADS = 512, 64, 16


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """One layer with the heads of DeepSeek-V2-Lite."""
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": 128, "v_head_dim": 128}
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "q_lora_rank": None}
    directory = tmp_path_factory.mktemp("wide") / "model"
    return load_model(write_family("deepseek_v3", directory, num_hidden_layers=1, **heads, **sizes))


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int], *, chunk: int, kv_dtype: str, layout: PageLayout) -> Tensor:
    """The last token's logits, after chunks of so many tokens."""
    kv = KVTensors(trace_layers(model), 16, 16, KV_DTYPES[kv_dtype], layout=layout)
    runner, pages = ModelRunner(model, kv), list(range(15))
    for first in range(0, len(ids), chunk):
        logits = runner.run(Batch([Row(ids[first : first + chunk], first, pages)]))
    return logits[0].clone()


def ids_of(count: int) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_pages_have_one_head_of_latent_and_rotated_elements(family: str, tmp_path: Path) -> None:
    layers = trace_layers(load_model(write_family(family, tmp_path / family)))
    assert layers == [LayerShape(num_kv_heads=1, head_dim=16 + 8)] * 2


def test_pages_are_in_16_bits_unless_said_otherwise(tmp_path: Path) -> None:
    directory = write_family("deepseek_v3", tmp_path / "model")
    types = {
        wanted: loading.load(Settings(model_dir=str(directory), kv_tokens=64, max_context=64, kv_dtype=wanted))
        for wanted in ("auto", "int8")
    }
    assert {wanted: loaded.runner.kv.layers[0].elements.dtype for wanted, loaded in types.items()} == {
        "auto": torch.bfloat16,
        "int8": torch.int8,
    }


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 6e-2)])
def test_heads_as_wide_as_those_of_real_models(
    wide_model: PreTrainedModel, kv_dtype: str, tolerance: float, layout: PageLayout
) -> None:
    ids = ids_of(150)
    got = logits_of(wide_model, ids, chunk=40, kv_dtype=kv_dtype, layout=layout)
    expected = stock_logits(wide_model, ids)[-1]
    assert (got - expected).norm() <= tolerance * expected.norm()


def test_products_of_a_token_are_the_same_to_the_bit_beside_others(wide_model: PreTrainedModel) -> None:
    heads = latent_attention.heads_of(wide_model.model.layers[0].self_attn)
    assert heads is not None
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, NUM_HEADS, 9, 128 + ROTATED, generator=generator)
    sums = torch.randn(1, 9, NUM_HEADS, RANK, generator=generator)
    alone = [heads.queries(query[:, :, at : at + 1]) for at in range(9)]
    assert torch.equal(torch.cat(alone, dim=2), heads.queries(query))
    assert torch.equal(torch.cat([heads.values(sums[:, at : at + 1]) for at in range(9)], dim=1), heads.values(sums))


def test_a_layer_that_has_its_heads_in_another_order_keeps_all_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served all the same, from more pages."""
    expand_kv = DeepseekV3Attention.expand_kv

    def values_first(self: DeepseekV3Attention, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand_kv(self, latents, rotated)
        return torch.cat((values, keys[..., self.qk_nope_head_dim :]), dim=-1), keys[..., : self.qk_nope_head_dim]

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", values_first)
    model = load_model(write_family("deepseek_v3", tmp_path / "model"))
    layers = trace_layers(model)
    assert layers == [LayerShape(num_kv_heads=4, head_dim=16 + 8)] * 2
    check_model(model, layers, PageLayout.PANELS)


def test_a_layer_that_is_not_understood_keeps_all_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the next release of transformers, whose method may take something else."""
    directory = write_family("deepseek_v3", tmp_path / "model")
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    model = read_model(directory)
    latent_attention.install(model)
    assert not latent_attention.is_installed(model)
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda _: None, raising=False)
    latent_attention.install(model)
    assert not latent_attention.is_installed(model)


def test_a_model_of_another_type_has_heads_of_that_type(wide_model: PreTrainedModel) -> None:
    """As on a GPU, where a model is converted when it has been checked."""
    ids = ids_of(40)
    expected = stock_logits(wide_model, ids)[-1]
    try:
        wide_model.to(torch.bfloat16)
        latent_attention.install(wide_model)
        heads = latent_attention.heads_of(wide_model.model.layers[0].self_attn)
        assert heads is not None
        assert heads.dtype == torch.bfloat16
        got = logits_of(wide_model, ids, chunk=7, kv_dtype="bfloat16", layout=PageLayout.HND)
    finally:
        wide_model.to(torch.float32)
        latent_attention.install(wide_model)
    assert (got - expected).norm() <= 5e-2 * expected.norm()
