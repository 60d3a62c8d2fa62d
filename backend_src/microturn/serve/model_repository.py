"""Writes the model repository of one run: the given one, with the chosen settings in the model's config.pbtxt."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from microturn.hosts.kserve.envelope import MODEL_NAME
from microturn.serve.errors import ServeError


class ModelRepository:
    """A Triton model repository with a model ``streaming_llm``.

    Args:
        path: its directory.

    Raises:
        ServeError: there is no such model, or its configuration does not parse.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._config_path = self._path / MODEL_NAME / "config.pbtxt"
        try:
            text = self._config_path.read_text()
            self._config = text_format.Parse(text, model_config_pb2.ModelConfig())
        except OSError as error:
            raise ServeError(
                f"no model repository in {path}: cannot read {MODEL_NAME}/config.pbtxt there; give one with "
                "--model-repository"
            ) from error
        except text_format.ParseError as error:
            raise ServeError(f"{self._config_path} does not parse: line {error}") from error
        # Without it Triton waits for its model process for ever.
        versions = [version for version in self._config_path.parent.iterdir() if version.name.isdigit()]
        if not any((version / "model.py").is_file() for version in versions):
            raise ServeError(f"no model in {self._config_path.parent}: a version directory with a model.py is missing")

    def takes(self, parameter: str) -> bool:
        """Whether the model's configuration declares a parameter."""
        return parameter in self._config.parameters

    @property
    def num_slots(self) -> int:
        """How many sequences Triton runs at a time."""
        return int(self._config.sequence_batching.oldest.max_candidate_sequences)

    def write(self, target: Path, settings: Mapping[str, str]) -> None:
        """Writes the repository of a run.

        Args:
            target: where, a directory that does not exist yet. The model is copied, other models are linked.
            settings: they replace or join the ``parameters`` of the configuration.
        """
        config = model_config_pb2.ModelConfig()
        config.CopyFrom(self._config)
        for name, value in settings.items():
            config.parameters[name].string_value = value
        target.mkdir()
        for entry in self._path.iterdir():
            if entry.name != MODEL_NAME:
                (target / entry.name).symlink_to(entry)
        model = target / MODEL_NAME
        shutil.copytree(self._path / MODEL_NAME, model, ignore=shutil.ignore_patterns("__pycache__"))
        (model / "config.pbtxt").write_text(text_format.MessageToString(config))
