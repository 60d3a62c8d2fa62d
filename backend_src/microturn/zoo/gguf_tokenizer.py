"""Converts the vocabulary in a GGUF file's metadata to a Hugging Face fast tokenizer.

Supports byte-level BPE as in GPT-2 (with SmolLM's pre-tokenizer), and Gemma's SentencePiece BPE with byte fallback. A
GGUF file only names its pre-tokenizer; its definition here follows the original models' tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from microturn.errors import InvalidArgument

_SPACE = "\u2581"  # SentencePiece's space


class _TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type`` that are used here."""

    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Mapping[str, Any], model_dir: Path, *, max_len: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with the chat template if the file has one.

    Args:
        metadata: all key-value pairs of the GGUF file.
        model_dir: an existing directory.
        max_len: longest context of the model, in tokens.

    Errors:
        InvalidArgument: an unsupported tokenizer family.
    """
    family = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if family == ("gpt2", "smollm"):
        tokenizer = _smollm(metadata)
    elif family == ("llama", "default") and metadata["general.architecture"] == "gemma3":
        tokenizer = _gemma(metadata)
    else:
        raise InvalidArgument(f"the GGUF tokenizer {'/'.join(family)} is not supported: give a Hugging Face directory")
    tokenizer.save(str(model_dir / "tokenizer.json"))

    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # Not the family's own class: some versions of those rebuild the pre-tokenizer instead of reading it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")


def _smollm(metadata: Mapping[str, Any]) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, metadata, list(vocab))
    return tokenizer


def _gemma(metadata: Mapping[str, Any]) -> Tokenizer:
    # Runs of spaces are plain spaces in the file, but are looked up after the normalizer has replaced them.
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in metadata["tokenizer.ggml.tokens"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_derive_merges(vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_whole_tokens(tokenizer, metadata, tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos_id]} $A",
        pair=f"{tokens[bos_id]} $A {tokens[bos_id]} $B",
        special_tokens=[(tokens[bos_id], bos_id)],
    )
    return tokenizer


def _derive_merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that a BPE vocabulary implies if the file lists none, the earliest token first.

    SentencePiece merges whichever neighbours give the piece of the best score; in Gemma's vocabulary that is the order
    of the ids. So each way to split a token into two known tokens is a merge; those of one token are ordered by the
    longest left part, as in Hugging Face.
    """
    merges = []
    for token in vocab:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Adds control tokens (as special) and user-defined ones, which are matched before merging."""
    added = [
        AddedToken(token, special=kind == _TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
