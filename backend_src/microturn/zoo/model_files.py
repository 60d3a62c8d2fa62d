"""A Hugging Face model directory as the conversions read it: its stored tensors, and all its small files."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from microturn.zoo.dequantization import Stored

# Everything but the weights: configs, vocabularies, templates.
_TEXT_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken"}
# Types of plain weights, by their names in safetensors files.
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


def copy_small_files(directory: Path, model_dir: Path) -> None:
    """Copies all files but the weights and their index.

    Errors:
        OSError: the directory cannot be written.
    """
    for path in directory.iterdir():
        if path.suffix in _TEXT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, model_dir / path.name)
    templates = directory / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, model_dir / templates.name)


def content_of(values: Tensor, dtype: str) -> memoryview:
    """The bytes of a tensor in a type of `TORCH_DTYPES`, as a safetensors file has them."""
    flat = values.to(TORCH_DTYPES[dtype]).contiguous().view(-1).view(torch.uint8)
    content: memoryview = flat.numpy().data
    return content
