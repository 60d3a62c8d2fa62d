"""Tests of fingerprint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from microturn.model.fingerprint import model_fingerprint


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.arange(1_000_000.0)}, directory / "model.safetensors")
    return directory


def test_the_same_files_have_the_same_fingerprint_wherever_they_lie(model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model_dir, copy)
    (copy / "README.md").write_text("A model.")
    fingerprint = model_fingerprint(model_dir)
    assert model_fingerprint(str(copy)) == fingerprint
    assert len(bytes.fromhex(fingerprint)) == 16


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_another_config_tokenizer_or_template_is_another_model(model_dir: Path, name: str) -> None:
    fingerprint = model_fingerprint(model_dir)
    (model_dir / name).write_text('{"changed": true}')
    assert model_fingerprint(model_dir) != fingerprint


@pytest.mark.parametrize(
    "weights",
    [
        {"weight": torch.arange(1_000_000.0) * 1.0001},
        {"weight": torch.arange(1_000_000.0).reshape(1000, 1000)},
        {"weight": torch.arange(1_000_001.0)},
        {"bias": torch.arange(1_000_000.0)},
        {"weight": torch.cat([torch.arange(999_999.0), torch.tensor([0.0])])},
    ],
    ids=["trained further", "other shape", "longer", "other name", "last number"],
)
def test_other_weights_are_another_model(model_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    fingerprint = model_fingerprint(model_dir)
    save_file(weights, model_dir / "model.safetensors")
    assert model_fingerprint(model_dir) != fingerprint


def test_rounded_weights_are_another_model(model_dir: Path) -> None:
    assert model_fingerprint(model_dir, "float32") == model_fingerprint(model_dir)
    assert model_fingerprint(model_dir, "int8") != model_fingerprint(model_dir)


def test_a_further_file_of_weights_is_another_model(model_dir: Path) -> None:
    fingerprint = model_fingerprint(model_dir)
    save_file({"more": torch.zeros(2)}, model_dir / "model-2.safetensors")
    assert model_fingerprint(model_dir) != fingerprint


def test_gigabytes_are_not_read(model_dir: Path) -> None:
    """A sparse file of 64 GB, which would take minutes to read whole."""
    with (model_dir / "model-huge.safetensors").open("wb") as file:
        file.write((2).to_bytes(8, "little") + b"{}")
        file.truncate(64 << 30)
    assert model_fingerprint(model_dir) != ""


def test_a_link_that_leads_nowhere_is_no_file_of_the_model(model_dir: Path) -> None:
    fingerprint = model_fingerprint(model_dir)
    for name in ("model-2.safetensors", "tokenizer.model"):
        (model_dir / name).symlink_to("/nowhere/weights")
    assert model_fingerprint(model_dir) == fingerprint
