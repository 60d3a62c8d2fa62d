"""Tests of loading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel

from microturn.engine import loading
from microturn.errors import InvalidArgument
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.cpu import probe_int8
from microturn.model.fingerprint import model_fingerprint
from microturn.settings import Settings
from microturn.text.model_text import ModelText
from support import models, tiny_tokenizers
from support.oracle import TOLERANCE, stock_logits
from support.tiny_model_dir import write_tiny_model


def test_a_pool_that_sizes_itself_counts_in_the_type_of_its_pages(
    smollm2_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 has 30 layers of 3 heads of 64, in int8 with a scale of 4 bytes; half of what is free is taken."""
    token_bytes = 30 * 2 * 3 * (64 + 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 1000 * token_bytes))
    engine = loading.load_engine(Settings(model_dir=smollm2_dir, kv_dtype="int8", weights="float32"))
    assert engine.environment.max_context == 1000
    last_layer = engine.runner.kv.layers[29]
    assert last_layer.elements.dtype == torch.int8
    assert [tensor.shape for tensor in last_layer.tensors] == [(63, 2, 3, 16 * 64 // 4, 4), (63, 2, 3, 16)]
    encode = ModelText.from_directory(Path(smollm2_dir)).encoder.encode
    logits = engine.runner.run(Batch([Row(encode("The capital of France is", begins=True), 0, [62])]))
    assert [int(logits.argmax())] == encode(" Paris", begins=False)


def test_layers_with_a_window_take_pages_out_of_one_pool_with_the_others(smollm2_dir: str, tmp_path: Path) -> None:
    """Two layers of three see 20 tokens: three groups, each with a page for the same tokens, as large as one layer."""
    model = models.sliding_window(vocab_size=49152)
    model.save_pretrained(tmp_path)
    for file in Path(smollm2_dir).iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).symlink_to(file)
    exact = {"weights": "float32", "kv_dtype": "float32"}
    engine = loading.load_engine(Settings(model_dir=str(tmp_path), kv_tokens=1000, max_context=1000, **exact))
    kv = engine.runner.kv
    assert [(kind.window, kind.num_groups) for kind in kv.groups.kinds] == [(None, 1), (20, 2)]
    assert [tuple(layer.elements.shape) for layer in kv.layers] == [(3 * 63, 2, 1, 16 * 16, 1)] * 3
    assert kv.layers[0].elements is kv.layers[1].elements is kv.layers[2].elements
    ids = list(range(100, 130))
    others = [RowPages([100, 7, 2, 5])]
    logits = engine.runner.run(Batch([Row(ids, 0, [62, 188], others=others)]))
    assert (logits[0] - stock_logits(model, ids)[-1]).abs().max() <= TOLERANCE


def test_weights_of_8_bits_take_the_place_of_float32_but_for_the_embeddings(
    smollm2: PreTrainedModel, smollm2_dir: str
) -> None:
    engine = loading.load_engine(Settings(model_dir=smollm2_dir, kv_tokens=256, max_context=256))
    model = engine.runner.model
    layer = model.model.layers[7]
    assert layer.self_attn.q_proj.weight.is_meta
    assert layer.mlp.down_proj.weight.is_meta
    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters() if not tensor.is_meta}
    assert sum(held.values()) < 114e6, "SmolLM2 has 28 million weights in its embeddings, which the head shares"
    assert engine.runner.vocab_size == 49152
    assert engine.environment.model_fingerprint == model_fingerprint(smollm2_dir, "int8")
    encode = ModelText.from_directory(Path(smollm2_dir)).encoder.encode
    prompt = encode("The capital of France is", begins=True)
    logits = engine.runner.run(Batch([Row(prompt, 0, [0])]))
    assert [int(logits.argmax())] == encode(" Paris", begins=False)
    difference = logits - stock_logits(smollm2, prompt)[-1:]
    assert 0.001 < difference.std() / logits.std() < 0.1


@pytest.mark.parametrize("weights", ["int8", "auto"])
def test_where_8_bits_are_refused_auto_is_float32(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe_int8, "TOLERANCE", -1.0)  # so that none is allowed
    model_dir = write_tiny_model(tmp_path / "tiny")
    settings = Settings(model_dir=str(model_dir), kv_tokens=256, max_context=256, weights=weights)
    if weights == "int8":
        with pytest.raises(
            InvalidArgument, match=r"cannot be int8 here: logits of Llama.* with .*; set weights=float32"
        ):
            loading.load_engine(settings)
        return
    with caplog.at_level("WARNING"):
        engine = loading.load_engine(settings)
    assert "weights in float32: logits of LlamaForCausalLM with 8-bit weights deviate" in caplog.text
    assert not engine.runner.model.model.layers[1].mlp.down_proj.weight.is_meta


def test_a_pool_that_holds_no_context_is_refused_before_a_pass_writes_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "warm_up", lambda *_args: pytest.fail("a pass has run"))
    settings = Settings(model_dir=str(write_tiny_model(tmp_path / "tiny")), kv_tokens=64, max_context=256)
    with pytest.raises(InvalidArgument, match="a pool of 4 pages of 16 tokens does not hold one context of 256 tokens"):
        loading.load_engine(settings)


def test_a_token_without_an_embedding_fails_nobody(tmp_path: Path) -> None:
    """A text with it would undo the turns of all sessions in its pass."""
    model_dir = write_tiny_model(tmp_path / "tiny")
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<PRE>", special=False)])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    prepared = loading.prepare(Settings(model_dir=str(model_dir), kv_tokens=1024, max_context=256))
    num_ids = prepared.loaded.runner.vocab_size
    assert tokenizer.get_vocab_size() == num_ids + 1
    assert max(prepared.text.encoder.encode("say <PRE> now", begins=True)) < num_ids
    prepared.loaded.runner.close()
