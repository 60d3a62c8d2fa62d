"""Tests of `microturn check`: what it says of models that are served and of others, and where it has that from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from microturn.bench.about import cpu_model
from microturn.cli import main
from microturn.engine.loading import Prepared, prepare
from microturn.errors import InvalidArgument
from microturn.planning import check
from microturn.planning.known_shapes import read_shape
from microturn.planning.on_disk import OnDisk
from microturn.settings import Settings
from support import models, tiny_tokenizers
from support.families import write_family

DOCS = Path(__file__).parents[3] / "docs" / "serve.md"
SMALL = ["--set", "kv_tokens=2048", "--set", "num_threads=1"]


def checked(capsys: pytest.CaptureFixture[str], model_dir: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["check", str(model_dir), "--json", *SMALL, *arguments]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def rows(text: str) -> dict[str, str]:
    """The lines of a report behind its head, by their names."""
    return {line[:12].strip(): line[12:] for line in text.splitlines()[1:]}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_family("llama", tmp_path / "llama")


def test_the_embedded_model_is_served_by_the_fast_layers(smollm2_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "smollm2-135m", "--set", "kv_tokens=65536"]) == 0
    captured = capsys.readouterr()
    head = "smollm2-135m (LlamaForCausalLM, 134.5 M parameters, 538.1 MB on disk, float32)"
    assert captured.out.splitlines()[0] == head
    said = rows(captured.out)
    assert {name: said[name] for name in list(said)[:5]} == {
        "served": "yes",
        "layers": "fast: one compiled call for all of them",
        "attention": "native",
        "weights": "int8, 248.7 MB",
        "KV": "int8, 12.2 KB a token; a pool of 65,536 tokens: 802.2 MB; a session of max_context (8,192): 100.3 MB",
    }
    assert [said[name] for name in ("windows", "embeddings", "roles", "grammars")] == ["yes"] * 4
    assert said["tools"].startswith("no: this model's chat template has no place for tools")
    assert said["memory"].endswith("at most while loading (this process)")
    assert said["speed here"].endswith(f"threads, {cpu_model()})")
    assert captured.err == f"microturn: loading and checking {smollm2_dir}, as a server would\n"
    documented = re.search(r"```\n(smollm2-135m \(.*?)```", DOCS.read_text(), re.DOTALL)
    assert documented is not None
    assert documented[1].splitlines()[:6] == captured.out.splitlines()[:6]
    assert list(rows(documented[1])) == list(said)


def test_the_numbers_are_those_that_loading_logs_and_uses(
    llama: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Prepared] = []

    def kept_prepare(settings: Settings) -> Prepared:
        kept.append(prepare(settings))
        return kept[0]

    monkeypatch.setattr(check, "prepare", kept_prepare)
    with caplog.at_level("INFO"):
        said = checked(capsys, llama)
    (prepared,) = kept
    assert said["passes_ms"] == {str(num_tokens): seconds * 1e3 for num_tokens, seconds in prepared.passes}
    assert list(said["passes_ms"]) == ["1", "16", "256"]
    pool, kv = prepared.loaded.pool, prepared.loaded.runner.kv
    assert said["pool_bytes"] == pool.num_pages * kv.bytes_per_page == said["kv_tokens"] * said["token_bytes"]
    assert said["full_bytes"] == said["resident_bytes"] + said["pool_bytes"]
    assert said["peak_bytes"] > 1e8
    assert (said["kv_tokens"], said["max_context"], said["num_threads"]) == (2048, 1024, 1)
    assert "LlamaForCausalLM on cpu: context of 1024 tokens, 128 pages of 16 tokens for 1 groups of layers (int8," in (
        caplog.text
    )
    assert "fused layers in int8, native attention, 1 threads" in caplog.text
    assert (said["layers"], said["weights"], said["attention"]) == ("compiled", "int8", "native")


def test_what_a_plan_counts_is_what_a_check_finds(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, shape = checked(capsys, llama), read_shape(str(llama))
    assert said["num_params"] == shape.num_params
    assert said["stored_bytes"] == shape.weight_bytes("bfloat16")
    assert said["token_bytes"] == shape.token_bytes("int8")
    assert said["session_bytes"] == shape.needs("int8", page_size=16, window_slack=256).session_bytes(1024)
    # Weights in 8 bits lie in panels of whole vectors, so tiny ones take more than their elements.
    assert shape.weight_bytes("int8") <= said["weight_bytes"] < shape.weight_bytes("float32")


def test_layers_with_a_window_of_their_own_keep_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = checked(capsys, write_family("gemma3_text", tmp_path / "gemma3"), "--set", "window_slack=64")
    assert said["session_bytes"] < said["max_context"] * said["token_bytes"]
    shape = read_shape(str(tmp_path / "gemma3"))
    assert said["session_bytes"] == shape.needs("int8", page_size=16, window_slack=64).session_bytes(1024)


def test_a_model_on_transformers_layers_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_family("starcoder2", tmp_path / "starcoder2")
    capsys.readouterr()  # the bar of writing it
    assert main(["check", str(model_dir), *SMALL]) == 0
    captured = capsys.readouterr()
    said = rows(captured.out)
    assert said["layers"].startswith("transformers' own, which are slower: its ")
    assert said["weights"].endswith(": Starcoder2ForCausalLM runs on transformers' layers")
    assert said["roles"].startswith("no: this model has no chat template")
    assert captured.err.count("\n") == 1, "what is in the report is not logged too"


def test_a_setting_is_no_reason(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = checked(capsys, llama, "--set", "weights=float32", "--set", "attention=torch")
    assert (said["layers"], said["weights"], said["attention"]) == ("fused", "float32", "torch")
    assert said["layers_reason"] is said["weights_reason"] is said["attention_reason"] is None
    assert said["stored_bytes"] <= said["weight_bytes"] < 1.01 * said["stored_bytes"], "norms are widened"
    reason = checked(capsys, llama, "--set", "page_size=20")["attention_reason"]
    assert reason == "page_size 20 is no multiple of 16"


def test_recurrent_layers_are_counted_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = tiny_tokenizers.save(tiny_tokenizers.byte_level(models.VOCAB_SIZE), tmp_path / "model")
    model = models.short_convolutions()
    model.save_pretrained(model_dir)
    assert main(["check", str(model_dir), *SMALL, "--set", "max_context=256"]) == 0
    said = rows(capsys.readouterr().out)
    num_attention = model.config.layer_types.count("full_attention")
    num_layers = len(model.config.layer_types)
    assert said["recurrent"].startswith(f"{num_layers - num_attention} of {num_layers} layers, a state of ")
    assert said["windows"] == "no: its recurrent layers remember what a window evicts"
    found = checked(capsys, model_dir, "--set", "max_context=256")
    shape = read_shape(str(model_dir))
    assert found["state_bytes"] == shape.state_bytes
    needs = shape.needs(found["kv_dtype"], page_size=16, window_slack=256)
    assert (found["token_bytes"], found["session_bytes"]) == (needs.token_bytes, needs.session_bytes(256))


def test_text_that_is_held_and_a_format_of_calls_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_family("llama", tmp_path / "llama", vocab_size=700)
    template = tiny_tokenizers.TRIMMING + "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    tokens = tiny_tokenizers.save(tiny_tokenizers.crossing(), tmp_path / "tokens", template)
    for file in tokens.iterdir():
        file.replace(model_dir / file.name)
    assert main(["check", str(model_dir), *SMALL]) == 0
    said = rows(capsys.readouterr().out)
    assert (said["roles"], said["tools"]) == ("yes", "yes, calls as hermes")
    assert said["text"].startswith("is held until a turn generates")


def test_a_model_that_is_refused_is_told_as_far_as_it_was_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = write_family("bloom", tmp_path / "bloom")
    with pytest.raises(InvalidArgument, match="BloomForCausalLM cannot be served: 0 of its 2 layers call") as refusal:
        prepare(Settings(model_dir=str(model_dir)))
    reason = refusal.value.args[0]
    capsys.readouterr()  # the bars of writing and loading it here
    assert main(["check", str(model_dir)]) == 1
    captured = capsys.readouterr()
    head, served = captured.out.splitlines()
    assert head.startswith("bloom (BloomForCausalLM, 0.1 M parameters, ")
    assert served.split() == ["served", "no"]
    assert captured.err.splitlines()[1:] == [f"microturn: error: {reason}"]
    said = checked(capsys, model_dir, code=1)
    assert (said["is_served"], said["reason"], said["stored_dtype"]) == (False, reason, "bfloat16")


def test_settings_that_do_not_fit_the_model_are_refused(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not hold one context" in checked(capsys, llama, "--set", "kv_tokens=64", code=1)["reason"]
    (tmp_path / "file").touch()
    reason = checked(capsys, llama, "--set", f"disk_tier_dir={tmp_path / 'file'}", code=1)["reason"]
    assert reason.startswith("setting 'disk_tier_dir' cannot be used")


def test_a_check_leaves_nothing_behind(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked(capsys, llama, "--set", f"disk_tier_dir={tmp_path / 'tier'}")
    assert list((tmp_path / "tier").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{empty}"], "has no config.json"),
        (["{empty}/nothing"], "is not there"),
        (["smollm3"], "unknown model 'smollm3': give a model directory"),
        (["{empty}", "--set", "kv_tokenz=1"], "unknown setting 'kv_tokenz': did you mean 'kv_tokens'?"),
        (["{empty}", "--set", "kv_tokens"], "--set takes key=value, not 'kv_tokens'"),
        (["{empty}", "--set", "weights=int4"], "setting 'weights' is one of"),
    ],
)
def test_what_is_no_model_or_no_setting_is_one_line_and_an_exit_code(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(argument.format(empty=tmp_path) for argument in arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--sett", "x"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", *arguments])
    assert "usage: microturn" in capsys.readouterr().err


def test_shards_and_types_are_read_from_the_files(llama: Path, tmp_path: Path) -> None:
    whole = OnDisk.of("tiny", llama)
    assert (whole.model, whole.architecture) == ("tiny", "LlamaForCausalLM")
    assert whole.stored_dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    (tmp_path / "shards" / "consolidated.safetensors").write_bytes(b"the same once more")
    shards = OnDisk.of("tiny", tmp_path / "shards")
    assert (shards.stored_dtype, shards.num_params) == ("float32", whole.num_params)
    assert shards.stored_bytes == 2 * whole.stored_bytes == 4 * whole.num_params


def test_weights_that_are_none_are_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "model.safetensors").write_bytes(b"something else altogether")
    assert "cannot be read as weights" in checked(capsys, llama, code=1)["reason"]
