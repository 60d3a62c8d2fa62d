from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from microturn.serve.errors import ServeError
from microturn.serve.model_repository import ModelRepository
from microturn.serve.options import default_model_repository

CONFIG = """
name: "streaming_llm"  # a comment
max_batch_size: 8
parameters { key: "model_dir" value { string_value: "" } }
parameters { key: "page_size" value { string_value: "16" } }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    version = tmp_path / "source" / "streaming_llm" / "1"
    (version / "__pycache__").mkdir(parents=True)
    (version / "model.py").write_text("model = 1\n")
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "source" / "other").mkdir()
    return tmp_path / "source"


def test_settings_replace_and_join_the_parameters(source, tmp_path):
    repository = ModelRepository(source)
    repository.write(tmp_path / "run", {"model_dir": 'a "quoted" \\ path', "mode": "session"})
    written = (tmp_path / "run" / "streaming_llm" / "config.pbtxt").read_text()
    config = text_format.Parse(written, model_config_pb2.ModelConfig())
    assert {name: value.string_value for name, value in config.parameters.items()} == {
        "model_dir": 'a "quoted" \\ path',
        "page_size": "16",
        "mode": "session",
    }
    assert config.max_batch_size == 8
    assert (source / "streaming_llm" / "config.pbtxt").read_text() == CONFIG


def test_the_model_is_copied_and_others_are_linked(source, tmp_path):
    ModelRepository(source).write(tmp_path / "run", {})
    model = tmp_path / "run" / "streaming_llm"
    assert (model / "1" / "model.py").read_text() == "model = 1\n"
    assert not model.is_symlink()
    assert not (model / "1" / "__pycache__").exists()
    assert (tmp_path / "run" / "other").readlink() == source / "other"


def test_whether_the_model_takes_a_parameter(source):
    repository = ModelRepository(source)
    assert repository.takes("model_dir")
    assert not repository.takes("mode")


def test_the_shipped_repository_takes_a_model():
    assert ModelRepository(default_model_repository()).takes("model_dir")


def test_how_many_sequences_triton_lets_go_on():
    assert ModelRepository(default_model_repository()).num_slots == 65536


def test_a_place_without_the_model_is_refused(tmp_path):
    with pytest.raises(ServeError, match=r"no model repository in .*--model-repository"):
        ModelRepository(tmp_path)


def test_a_broken_configuration_is_refused_with_its_line(source):
    (source / "streaming_llm" / "config.pbtxt").write_text('name: "streaming_llm"\nmax_batch: 8\n')
    with pytest.raises(ServeError, match=r"config.pbtxt does not parse: line 2:.*max_batch"):
        ModelRepository(source)


def test_a_model_without_its_program_is_refused(source):
    """Triton itself would wait for the model process for ever."""
    (source / "streaming_llm" / "1" / "model.py").unlink()
    with pytest.raises(ServeError, match=r"a version directory with a model\.py is missing"):
        ModelRepository(source)
