"""Converts a multimodal Hugging Face directory to one of its language part, tensor by tensor.

What such a model is: an encoder, a projector, and a causal language model that is handed their embeddings in place of
tokens. The encoder and the projector stay with the client.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from microturn.errors import InvalidArgument
from microturn.zoo.model_files import TORCH_DTYPES, copied, stored_tensors, write_model

# A weight of the language part, as transformers has named them over the years; the head may stand beside that part.
_LANGUAGE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
_HEAD = "lm_head."


class LanguagePart:
    """The language part of a model directory.

    Errors:
        InvalidArgument: transformers does not know the model, or has no causal language model for its language part;
            or no weights of one are there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = _text_config(directory)
        try:
            with ExitStack() as files:
                stored = stored_tensors(directory, files)
                names = {name: ours for name in stored if (ours := _name_of(name)) is not None}
                self._weights = [copied(ours, name, stored) for name, ours in names.items()]
        except SafetensorError as error:
            raise InvalidArgument(f"the weights in {directory} cannot be read: {error}") from error
        if not self._weights:
            raise InvalidArgument(f"no weight in {directory} is named as one of a language part")
        for entry, parts, _ in self._weights:
            if entry.dtype not in TORCH_DTYPES:
                raise InvalidArgument(
                    f"{parts['']} in {directory} is of the type {entry.dtype}: convert it to a type of floats"
                )

    @property
    def converted_bytes(self) -> int:
        """Disk space of the converted directory, without its small files."""
        return sum(weight.entry.num_bytes for weight in self._weights)

    def convert(self, model_dir: Path, *, label: str) -> None:
        """Creates a directory with the language part and all files but the weights.

        Args:
            model_dir: does not exist yet. After an error it may be incomplete.
            label: of the model in the progress bar.

        Errors:
            OSError: the directory cannot be written.
        """
        # The whole model's config says otherwise for some: what is stored decides.
        has_head = any(weight.entry.name.startswith(_HEAD) for weight in self._weights)
        config = {**self._config, "tie_word_embeddings": not has_head}
        write_model(self._directory, model_dir, config, self._weights, label=f"{label}: language part")


def _name_of(name: str) -> str | None:
    """What a causal language model alone calls a weight of the whole model; None for one of another part."""
    if name.startswith(_HEAD):
        return name
    match = _LANGUAGE.fullmatch(name)
    if match is None:
        return None
    return match[1] if match[1].startswith(_HEAD) else f"model.{match[1]}"


def _text_config(directory: Path) -> dict[str, Any]:
    try:
        whole = AutoConfig.from_pretrained(directory, local_files_only=True)
        config = whole.get_text_config(decoder=True)
    except Exception as error:  # transformers may raise anything
        raise InvalidArgument(f"the config.json in {directory} cannot be read: {error}") from error
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if causal is None:
        raise InvalidArgument(
            f"{directory} cannot be served: transformers has no causal language model for the language part "
            f"({config.model_type}) of a {whole.model_type}"
        )
    # All of it: defaults of the whole model's class for its language part are not those of that part alone.
    said: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**said, "architectures": [causal], "dtype": said.get("dtype") or _dtype(whole)}


def _dtype(whole: Any) -> str | None:
    return None if whole.dtype is None else str(whole.dtype).removeprefix("torch.")
