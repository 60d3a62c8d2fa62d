"""Multimodal checkpoints: what is served is their language part, which is made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, Gemma3Config, Qwen2VLConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from microturn.errors import InvalidArgument
from microturn.model import runner
from microturn.zoo.language_part import LanguagePart
from microturn.zoo.store import LOADED_WHOLE, resolve_model
from support import media_checkpoints
from support.quantized_checkpoints import KINDS, write_quantized

FAMILIES = [media_checkpoints.idefics3, media_checkpoints.llava, media_checkpoints.qwen2_audio]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICROTURN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.mark.parametrize("write", FAMILIES)
def test_each_weight_is_that_of_the_whole_model(write: Callable[[Path], Path], tmp_path: Path, own_cache: Path) -> None:
    checkpoint = write(tmp_path / "whole")
    served = resolve_model(str(checkpoint))
    assert served.parent == own_cache
    part, whole = runner.read_model(served), AutoModelForMultimodalLM.from_pretrained(checkpoint)
    expected = {f"model.{name}": weight for name, weight in whole.model.get_decoder().state_dict().items()}
    expected["lm_head.weight"] = whole.lm_head.weight
    assert part.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in part.state_dict().items())
    stored = load_file(served / "model.safetensors")
    assert LanguagePart(checkpoint).converted_bytes == sum(weight.nbytes for weight in stored.values())
    assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in served.iterdir()}
    written = (served / "model.safetensors").stat().st_ino
    assert resolve_model(str(checkpoint)) == served
    assert (served / "model.safetensors").stat().st_ino == written


def test_the_names_of_todays_checkpoints_are_known_too(tmp_path: Path) -> None:
    """transformers saves LLaVA's weights under the names that they had at first."""
    checkpoint = media_checkpoints.llava(tmp_path / "old")
    LanguagePart(checkpoint).convert(tmp_path / "expected", label="m")
    file = checkpoint / "model.safetensors"
    renamed = {name.replace("language_model.model.", "model.language_model."): w for name, w in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    LanguagePart(checkpoint).convert(tmp_path / "got", label="m")
    expected, got = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "got"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(weight, got[name]) for name, weight in expected.items())


def test_one_with_quantized_weights_is_dequantized_first(tmp_path: Path, own_cache: Path) -> None:
    plain = media_checkpoints.qwen2_audio(tmp_path / "plain")
    write_quantized(plain, tmp_path / "quantized", tmp_path / "intended", KINDS["gptq 8"])
    served, intended = (resolve_model(str(tmp_path / name)) for name in ("quantized", "intended"))
    assert len(list(own_cache.glob("*/model.safetensors"))) == 3
    expected, got = (load_file(model / "model.safetensors") for model in (intended, served))
    assert expected.keys() == got.keys()
    assert all(torch.equal(weight, got[name]) for name, weight in expected.items())


def test_what_transformers_loads_as_a_language_model_stays_as_it_is(tmp_path: Path, own_cache: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path / "gemma3")
    save_file({"a": torch.zeros(1)}, tmp_path / "gemma3" / "model.safetensors")
    assert resolve_model(str(tmp_path / "gemma3")) == tmp_path / "gemma3"
    assert not own_cache.exists()


def test_all_models_that_transformers_loads_whole_are_known() -> None:
    parts = {
        name: {*CONFIG_MAPPING[name].sub_configs, *getattr(CONFIG_MAPPING[name], "sub_configs_defaults", {})}
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING
    }
    assert {name for name, of in parts.items() if "text_config" in of} <= LOADED_WHOLE


def test_a_language_part_that_is_none_by_itself_is_refused_by_name(tmp_path: Path, own_cache: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path / "whole")
    save_file({"model.language_model.norm.weight": torch.zeros(1)}, tmp_path / "whole" / "model.safetensors")
    complaint = r"no causal language model for the language part \(qwen2_vl_text\) of a qwen2_vl$"
    with pytest.raises(InvalidArgument, match=complaint):
        resolve_model(str(tmp_path / "whole"))
    assert not list(own_cache.parent.rglob("config.json"))


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"vision_tower.weight": torch.zeros(1)}, "no weight in .* is named as one of a language part"),
        ({"lm_head.weight": torch.zeros(1, dtype=torch.int8)}, r"lm_head.weight in .* is of the type I8"),
    ],
)
def test_weights_that_are_none_of_a_language_part_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], complaint: str
) -> None:
    checkpoint = media_checkpoints.llava(tmp_path / "whole")
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(InvalidArgument, match=complaint):
        LanguagePart(checkpoint)


def test_a_config_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "text_config": {}}))
    with pytest.raises(InvalidArgument, match=r"config\.json in .* cannot be read"):
        LanguagePart(tmp_path)
