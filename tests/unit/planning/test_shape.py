"""Tests of microturn.planning.shape and known_shapes: against hand-made sums, known figures and the engine's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.tensors import KV_DTYPES, KVTensors
from microturn.model import recurrent, runner, tracing
from microturn.planning.known_shapes import NAMED_CONFIGS, read_shape, shape_of
from microturn.planning.shape import Experts, ModelShape
from microturn.zoo.language_part import LanguagePart
from support import gguf_files, media_checkpoints
from support.families import write_family

# Two layers of 2 heads of 8, one of which sees 20 tokens; a linear of 100 x 10 and a head of 50 x 4, embeddings too.
SMALL = ModelShape(
    name="small",
    num_params=1000 + 200 + 30,
    num_product_params=1000 + 200,
    num_product_rows=100 + 50,
    num_embedding_params=200,
    stored_bytes=2,
    shares_head=True,
    layers=(LayerShape(2, 8), LayerShape(2, 8, window=20)),
    num_heads=4,
    max_context=0,
    num_layers=2,
)
# The same with three layers of experts 10 x 8, of which a token chooses 2 of 4, and a state of 2 pages in 8 bits.
MIXED = replace(
    SMALL,
    num_params=SMALL.num_params + 3 * 320,
    num_product_params=SMALL.num_product_params + 3 * 320,
    num_product_rows=SMALL.num_product_rows + 3 * 40,
    experts=Experts(num_params=3 * 320, num_rows=3 * 40, chosen_share=0.5),
    state_bytes=2 * 16 * 48,
)


def test_weights_in_memory_and_as_a_step_reads_them() -> None:
    assert SMALL.num_other_params == 30
    assert SMALL.weight_bytes("float32") == 4 * 1230
    assert SMALL.weight_bytes("bfloat16") == 2 * 1230
    # Products in a byte each, a scale for each of their rows; embeddings as they are stored, the head a copy, norms in
    # float32.
    assert SMALL.weight_bytes("int8") == 1200 + 4 * 150 + 2 * 200 + 4 * 30
    assert SMALL.step_weight_bytes("bfloat16", 1) == 2 * 1230
    assert SMALL.step_weight_bytes("int8", 8) == 1200 + 4 * 150 + 4 * 30


def test_of_experts_a_step_reads_those_that_its_tokens_choose() -> None:
    assert MIXED.num_other_params == 30
    assert MIXED.weight_bytes("bfloat16") == 2 * (1230 + 960)
    for num_tokens, share in ((1, 1 / 2), (2, 3 / 4), (3, 7 / 8)):
        assert MIXED.step_weight_bytes("bfloat16", num_tokens) == 2 * (1230 + 960 * share)
        of_int8 = MIXED.step_weight_bytes("int8", num_tokens) - SMALL.step_weight_bytes("int8", num_tokens)
        assert of_int8 == (960 + 4 * 120) * share
    assert MIXED.token_flops(100) == SMALL.token_flops(100) + 2 * 480


def test_recurrent_states_are_counted_beside_the_kv() -> None:
    """Of 100 tokens the states behind 64 and 100 are kept; each step reads one of a session and writes it."""
    sizes = {"page_size": 16, "window_slack": 10}
    plain, mixed = (shape.needs("int8", **sizes).session_bytes(100) for shape in (SMALL, MIXED))
    assert mixed == plain + 2 * MIXED.state_bytes
    assert MIXED.visible_bytes("int8", 100) == SMALL.visible_bytes("int8", 100) + 2 * MIXED.state_bytes


def test_kv_of_a_token_and_of_a_session() -> None:
    assert SMALL.token_bytes("float32") == 2 * (2 * 2 * 8 * 4)
    assert SMALL.token_bytes("int8") == 2 * (2 * 2 * (8 + 4))
    # 100 tokens are 7 pages of 16; of the other layer 19 + 10 + 16 are kept, 3 pages. A page serves one layer.
    page_bytes = 16 * 2 * 2 * 8 * 2
    needs = SMALL.needs("bfloat16", page_size=16, window_slack=10)
    assert needs.session_bytes(100) == (7 + 3) * page_bytes
    assert needs.session_bytes(17) == (2 + 2) * page_bytes
    assert SMALL.visible_bytes("bfloat16", 100) == (100 + 20) * 2 * 2 * 8 * 2


def test_operations_of_a_token() -> None:
    # Each weight is multiplied and added; each head's query meets, and each weight weighs, what the layer sees.
    assert SMALL.token_flops(100) == 2 * (1200 + 30) + 4 * 4 * 8 * (100 + 20)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_tokens_kv_is_what_the_engine_keeps(kv_dtype: str) -> None:
    assert SMALL.token_bytes(kv_dtype) == KVTensors.bytes_per_token(SMALL.layers, KV_DTYPES[kv_dtype])


def test_smollm2_is_as_measured() -> None:
    shape = read_shape("smollm2-135m")
    assert shape.num_params == 134_515_008
    assert [shape.token_bytes(kv_dtype) for kv_dtype in KV_DTYPES] == [46_080, 23_040, 11_520, 12_240]
    # `make bench-weights` has counted what the products of a real engine take.
    assert shape.product_bytes("float32") == 537_919_488
    assert shape.product_bytes("int8") == 135_298_560
    assert shape.max_context == 8192


def test_llama_8b_is_as_known() -> None:
    shape = read_shape("llama-3.1-8b")
    assert shape.num_params == 8_030_261_248
    assert shape.weight_bytes("bfloat16") == pytest.approx(16.06e9, rel=1e-3)
    assert shape.step_weight_bytes("bfloat16", 1) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert shape.token_bytes("bfloat16") == 131_072
    assert not shape.shares_head


def test_layers_with_a_window_keep_what_the_readme_says_of_gemma() -> None:
    shape = read_shape("gemma3-270m")
    assert shape.num_params == 268_098_176
    assert [layer.window for layer in shape.layers] == ([512] * 5 + [None]) * 3
    for context_len, whole_mb, kept_mb in ((4000, 147, 49), (32_000, 1180, 221)):
        assert shape.token_bytes("float32") * context_len / 1e6 == pytest.approx(whole_mb, abs=0.5)
        kept_bytes = shape.needs("float32", page_size=16, window_slack=256).session_bytes(context_len)
        assert kept_bytes / 1e6 == pytest.approx(kept_mb, abs=0.7)


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_named_shapes_have_as_many_parameters_as_their_authors_say(name: str, num_params: int) -> None:
    assert read_shape(name).num_params == num_params


def test_a_directory_is_counted_as_its_weights_are(smollm2_dir: str) -> None:
    shape = read_shape(smollm2_dir)
    assert shape.name == Path(smollm2_dir).name
    with safe_open(Path(smollm2_dir) / "model.safetensors", "pt") as weights:
        stored = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    assert shape.num_params == sum(torch.Size(size).numel() for size in stored.values())
    assert read_shape(f"{smollm2_dir}/config.json") == shape == read_shape("smollm2-135m")


@pytest.mark.parametrize(
    "family",
    # Experts of several kinds; recurrent layers of several kinds, and with experts; KV that layers share; latent KV.
    ["mixtral", "gpt_oss", "ernie4_5_moe", "lfm2", "falcon_h1", "granitemoehybrid", "gemma3n_text", "deepseek_v3"],
)
def test_a_shape_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    directory = write_family(family, tmp_path / family)
    model = runner.prepare_model(runner.read_model(directory), "cpu")
    shape = read_shape(str(directory))
    assert shape.layers == tuple(tracing.trace_layers(model))
    assert shape.state_bytes == recurrent.state_bytes(model)
    assert shape.is_latent == (family == "deepseek_v3")
    assert shape.num_params == model.num_parameters()
    of_experts = [p.numel() for name, p in model.named_parameters() if "experts" in name and p.dim() == 3]
    assert (shape.experts == Experts()) == (not of_experts)
    assert shape.experts.num_params == sum(of_experts)
    assert shape.experts.chosen_share == (0.5 if of_experts else 1)


def test_of_a_gguf_file_its_metadata_says_all(tmp_path: Path) -> None:
    written = gguf_files.write_llama(tmp_path / "tiny.gguf")
    shape = read_shape(str(tmp_path / "tiny.gguf"))
    assert (shape.name, shape.num_params) == ("tiny", written.num_parameters())
    assert len(shape.layers) == shape.num_layers == written.config.num_hidden_layers


@pytest.mark.parametrize("write", [media_checkpoints.llava, media_checkpoints.idefics3])
def test_of_a_multimodal_model_the_language_part_counts(write: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "whole")
    LanguagePart(checkpoint).convert(tmp_path / "part", label="m")
    part, whole = read_shape(str(tmp_path / "part")), read_shape(str(checkpoint))
    assert replace(whole, name="part") == part
    assert part.num_params == runner.read_model(tmp_path / "part").num_parameters()


def test_what_has_no_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no llama-9/?.*one of gemma3-270m, llama"):
        read_shape("llama-9")
    with pytest.raises(InvalidArgument, match=r"no .*config\.json"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_shape(str(tmp_path))
    for config, reason in (
        ([], "names no model_type"),
        ({"hidden_size": 8}, "names no model_type"),
        ({"model_type": "no-such-model"}, "no causal language model"),
        ({"model_type": "vit"}, "no causal language model"),
        ({**NAMED_CONFIGS["smollm2-135m"], "hidden_size": "wide"}, "no causal language model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidArgument, match=reason):
            read_shape(str(tmp_path))


def test_a_model_whose_attention_is_not_ours_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be served"):
        shape_of("bloom", {"model_type": "bloom", "n_layer": 2, "n_head": 2, "hidden_size": 32, "vocab_size": 64})
