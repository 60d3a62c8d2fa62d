"""The fingerprint of a model directory: servers with equal fingerprints compute the same.

Covered whole are the config, the generation config and all files of the tokenizer and its templates. Of each weights
file the header (names, types and shapes of its tensors) and the size are covered whole, of its numbers 64 blocks of 4
KiB, evenly spread: gigabytes are not read at every start, and a model that was trained further differs in nearly all of
its numbers. A file in which a few numbers were edited by hand keeps its fingerprint. The type of the weights is
covered; kernels and the path of the directory are not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from microturn.zoo import file_sample

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab*",
    "merges.txt",
)


def model_fingerprint(model_dir: str | Path, weights: str = "float32") -> str:
    """The fingerprint of a model: 32 hex digits.

    Args:
        model_dir: a Hugging Face model directory.
        weights: the type in which its weights are kept.

    Raises:
        OSError: a file cannot be read.
    """
    directory = Path(model_dir)
    fingerprint = hashlib.blake2b(digest_size=16)
    text_files = {path for pattern in _TEXT_FILES for path in directory.glob(pattern) if path.is_file()}
    for path in sorted(text_files):
        _add(fingerprint, path.relative_to(directory).as_posix().encode(), path.read_bytes())
    for path in sorted(path for path in directory.glob("*.safetensors") if path.is_file()):
        _add(fingerprint, path.name.encode(), _sample(path))
    if weights != "float32":
        _add(fingerprint, b"weights", weights.encode())
    return fingerprint.hexdigest()


def _add(fingerprint: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        fingerprint.update(len(part).to_bytes(8, "little") + part)


def _sample(path: Path) -> bytes:
    """The size, the header and some of the numbers of a safetensors file."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        sampled = num_bytes.to_bytes(8, "little") + file.read(min(header_len, num_bytes))
        return sampled + b"".join(file_sample.blocks(file, num_bytes, first=file.tell()))
