"""Resolves a model: a user's directory as it is, and what has to be converted from the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microturn.errors import InvalidArgument
from microturn.zoo.cache import Source, default_cache_dir, prepare
from microturn.zoo.embedded_models import EMBEDDED_MODELS
from microturn.zoo.quantization_config import read_quantization
from microturn.zoo.sources import EmbeddedSource, GgufSource, MultimodalSource, QuantizedSource

# Models with several parts that transformers loads as causal language models. To ask it takes seconds at each start.
LOADED_WHOLE = {
    "dots3_note",
    "emu3",
    "fuyu",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_assistant",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "got_ocr2",
    "llama4",
    "mllama",
    "moss_transcribe_diarize",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
}
CONVERTED = "converted"  # the folder in the cache of what was made from users' own files


def resolve_model(model: str, *, cache_dir: Path | None = None) -> Path:
    """The Hugging Face directory of a model, absolute, with plain weights.

    Args:
        model: a model directory, a GGUF file, or the name of an embedded model; give a directory of the same name with
            a slash. An embedded model that is not cached is downloaded and converted. A GGUF file, a directory with
            quantized weights, and one with an encoder before its language part, which is what is served of it, are
            converted once, and anew when they change.
        cache_dir: of converted models; None is ``$MICROTURN_CACHE`` or ``~/.cache/microturn``.

    Errors:
        InvalidArgument: there is no such directory, file or name, the directory is incomplete, or the conversion does
            not know the architecture, the quantization or the language part.
        Unavailable: the embedded model cannot be downloaded, or differs from the pinned one.
        ResourceExhausted: the cache's disk is too full.
        FailedPrecondition: the cache cannot be read or written.
    """
    cache_dir = cache_dir or default_cache_dir()
    if model in EMBEDDED_MODELS:
        return prepare(EmbeddedSource(EMBEDDED_MODELS[model]), cache_dir)
    path = Path(model).expanduser().resolve()
    if not path.exists() and os.sep not in model:
        raise InvalidArgument(
            f"unknown model '{model}': give a model directory, a GGUF file or one of "
            f"{', '.join(sorted(EMBEDDED_MODELS))}"
        )
    while source := _source_of(path):  # a checkpoint can be quantized and multimodal
        path = prepare(source, cache_dir / CONVERTED)
    return path


def _source_of(path: Path) -> Source | None:
    """What to convert; None where the directory can be served as it is."""
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path)
    config = _check_model_dir(path)
    if read_quantization(path, config) is not None:
        return QuantizedSource(path)
    return MultimodalSource(path) if is_multimodal(config) else None


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a language part is one of several parts, and transformers loads no causal language model of the whole."""
    return isinstance(config.get("text_config"), dict) and config.get("model_type") not in LOADED_WHOLE


def _check_model_dir(path: Path) -> dict[str, Any]:
    """The config of a model directory.

    Errors:
        InvalidArgument: it is not a directory with a config and complete weights.
    """
    if not path.is_dir():
        raise InvalidArgument(
            f"{path} is {'a file' if path.exists() else 'not there'}: give a model directory or a GGUF file"
        )
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise InvalidArgument(f"the model directory {path} has no config.json") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the model directory {path} has a config.json that cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"the model directory {path} has a config.json that is no object")
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        try:
            shards = set(json.loads(index_path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"{index_path} cannot be read as an index of weights: {error!r}") from None
        if missing := sorted(shard for shard in shards if not (path / shard).is_file()):
            raise InvalidArgument(f"the model directory {path} lacks weights: {', '.join(missing)}")
    elif not any(path.glob("*.safetensors")):
        raise InvalidArgument(f"the model directory {path} has no weights (*.safetensors)")
    return config
