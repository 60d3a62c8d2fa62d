"""Tests of serve.published: what clients are told before they open a session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microturn.model.fingerprint import model_fingerprint
from microturn.serve.errors import ServeError
from microturn.serve.published import PUBLISHED, published_parameters
from microturn.settings import Settings


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    return tmp_path


def test_the_model_and_its_limits_are_told(model_dir: Path) -> None:
    told = published_parameters("smollm2-135m", model_dir, Settings(max_sessions=7, idle_timeout_s=5))
    assert tuple(told) == PUBLISHED
    assert told["model_name"] == "smollm2-135m"
    assert told["model_fingerprint"] == model_fingerprint(model_dir)
    assert json.loads(told["limits"]) == {
        "max_context": 8192,
        "max_sessions": 7,
        "max_queued_turns": 8,
        "window_slack": 256,
        "idle_timeout_s": 5,
        "max_idle_timeout_s": 3600,
    }


def test_a_directory_is_called_by_its_name(model_dir: Path) -> None:
    assert published_parameters(f"{model_dir}/", model_dir, Settings())["model_name"] == model_dir.name


def test_a_setting_bounds_the_context(model_dir: Path) -> None:
    told = published_parameters("a", model_dir, Settings(max_context=512))
    assert json.loads(told["limits"])["max_context"] == 512


@pytest.mark.parametrize(
    ("config", "max_context"), [('{"text_config": {"max_position_embeddings": 64}}', 64), ("{}", None)]
)
def test_the_context_is_what_the_config_says(model_dir: Path, config: str, max_context: int | None) -> None:
    (model_dir / "config.json").write_text(config)
    assert json.loads(published_parameters("a", model_dir, Settings())["limits"]).get("max_context") == max_context


@pytest.mark.parametrize("config", [None, "{"])
def test_a_model_that_cannot_be_read_is_refused(model_dir: Path, config: str | None) -> None:
    (model_dir / "config.json").unlink()
    if config is not None:
        (model_dir / "config.json").write_text(config)
    with pytest.raises(ServeError, match="cannot be read"):
        published_parameters("a", model_dir, Settings())
