"""A Hugging Face model directory as the conversions read it, and as they write one of plain weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from microturn.zoo.quantization_config import MODELOPT_FILE
from microturn.zoo.quantized_format import Stored
from microturn.zoo.safetensors_file import TensorEntry, write_safetensors

# Everything but the weights: configs, vocabularies, templates.
_TEXT_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken"}
# Types of plain weights, by their names in safetensors files.
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Scales of 8-bit floats, beside weights that transformers reads: of a weight's rows, float32 [out, blocks of inputs]
# (``<module>.weight_scale``), and of a layer's keys and values, float32 [] (``<attention>.k_scale`` and ``.v_scale``).
SCALES_FILE = "float8-scales.safetensors"
_SCALES = (".weight_scale", ".k_scale", ".v_scale")


class PlainTensor(NamedTuple):
    """A tensor to write: the names of the stored ones that it is made of, by their parts, and how, given these."""

    entry: TensorEntry
    parts: Mapping[str, str]
    values: Callable[[Mapping[str, Tensor]], Tensor]


def copied(name: str, stored_name: str, stored: Mapping[str, Stored]) -> PlainTensor:
    """A tensor as it is stored, under a name."""
    of = stored[stored_name]
    return PlainTensor(TensorEntry(name, of.get_dtype(), of.get_shape()), {"": stored_name}, lambda parts: parts[""])


def stored_tensors(directory: Path, files: ExitStack) -> dict[str, Stored]:
    """All tensors by their names, read only when they are asked for.

    Errors:
        SafetensorError: a file is no safetensors file.
    """
    stored = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        stored.update({name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    return stored


def write_model(
    directory: Path, model_dir: Path, config: Mapping[str, Any], tensors: Sequence[PlainTensor], *, label: str
) -> None:
    """Creates a directory with plain weights, one after another, and all files of another but its weights.

    Args:
        directory: that is converted.
        model_dir: does not exist yet. After an error it may be incomplete.
        config: content of its config.json.
        tensors: to write; scales go to a file of their own.
        label: of the progress bar.

    Errors:
        OSError: the directory cannot be written.
    """
    model_dir.mkdir()
    _copy_small_files(directory, model_dir)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    of_files: dict[str, list[PlainTensor]] = {"model.safetensors": [], SCALES_FILE: []}
    for tensor in tensors:
        of_files[SCALES_FILE if tensor.entry.name.endswith(_SCALES) else "model.safetensors"].append(tensor)
    with ExitStack() as files:
        stored = stored_tensors(directory, files)
        for file, held in of_files.items():
            contents = (
                _content_of(values({part: stored[name][...] for part, name in parts.items()}), entry.dtype)
                for entry, parts, values in tqdm(held, desc=label, unit="tensor", disable=file == SCALES_FILE)
            )
            if held:
                write_safetensors(model_dir / file, [tensor.entry for tensor in held], contents)


def _copy_small_files(directory: Path, model_dir: Path) -> None:
    """Copies all files but the weights, their index, and what says how they were quantized."""
    for path in directory.iterdir():
        if path.suffix in _TEXT_SUFFIXES and not path.name.endswith((".index.json", MODELOPT_FILE)):
            shutil.copyfile(path, model_dir / path.name)
    templates = directory / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, model_dir / templates.name)


def _content_of(values: Tensor, dtype: str) -> memoryview:
    """The bytes of a tensor in a type of `TORCH_DTYPES`, as a safetensors file has them."""
    flat = values.to(TORCH_DTYPES[dtype]).contiguous().view(-1).view(torch.uint8)
    content: memoryview = flat.numpy().data
    return content
