"""Converts the vocabulary in a GGUF file's metadata to a Hugging Face fast tokenizer.

Supports byte-level BPE as in GPT-2 with the pre-tokenizers in `_BYTE_LEVEL`, and SentencePiece's BPE with byte fallback
as in Llama 2, Mistral and Gemma. A GGUF file only names its pre-tokenizer; its definition here follows the original
models' tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from microturn.errors import InvalidArgument

_SPACE = "\u2581"  # SentencePiece's space
_GEMMA_END = "<end_of_turn>"


_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace("{1,3}", "")


class _TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type`` that are used here."""

    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class _ByteLevel:
    """A variant of byte-level BPE.

    Attributes:
        pre_tokenizers: what splits a text, before its bytes are spelled.
        composes: whether a text is brought into Unicode's form C.
        takes_whole: whether a word that is a token is not merged from its parts.
        begins: whether BOS is before a text, where the file does not say.
    """

    pre_tokenizers: tuple[pre_tokenizers.PreTokenizer, ...]
    composes: bool = False
    takes_whole: bool = False
    begins: bool = False


def _split(pattern: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated"), spelled


_BYTE_LEVEL = {
    "smollm": _ByteLevel(
        (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))
    ),
    "qwen2": _ByteLevel(_split(_SPLIT_QWEN2), composes=True),
    "llama-bpe": _ByteLevel(_split(_SPLIT_LLAMA3), takes_whole=True, begins=True),
}


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Errors: InvalidArgument: an unsupported tokenizer family."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if not (model == "gpt2" and pre in _BYTE_LEVEL) and (model, pre) != ("llama", "default"):
        raise InvalidArgument(
            f"the GGUF tokenizer {model}/{pre} is not supported, llama/default and "
            f"{', '.join(f'gpt2/{known}' for known in _BYTE_LEVEL)} are: give a Hugging Face directory"
        )


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of a config that the file has; ends of a turn end an answer too."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
    ids = {config_key: metadata.get(f"tokenizer.ggml.{key}") for key, config_key in names.items()}
    eot_id = metadata.get("tokenizer.ggml.eot_token_id")
    if eot_id is None and metadata["general.architecture"] == "gemma3" and _GEMMA_END in tokens:
        eot_id = tokens.index(_GEMMA_END)
    if eot_id not in (None, ids["eos_token_id"]):
        ids["eos_token_id"] = [ids["eos_token_id"], eot_id]
    return {key: value for key, value in ids.items() if value is not None}


def write_tokenizer(metadata: Mapping[str, Any], model_dir: Path, *, max_len: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with the chat template if the file has one.

    Args:
        metadata: all key-value pairs of the GGUF file.
        model_dir: an existing directory.
        max_len: longest context of the model, in tokens.

    Errors:
        InvalidArgument: an unsupported tokenizer family.
    """
    check_tokenizer(metadata)
    if metadata["tokenizer.ggml.model"] == "gpt2":
        tokenizer = _byte_level(metadata, _BYTE_LEVEL[metadata["tokenizer.ggml.pre"]])
    elif metadata["general.architecture"] == "gemma3":
        tokenizer = _gemma(metadata)
    else:
        tokenizer = _sentencepiece(metadata)
    # Its own `save` ends with a bare Exception where the disk is full.
    (model_dir / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")

    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # Not the family's own class: some versions of those rebuild the pre-tokenizer instead of reading it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")


def _byte_level(metadata: Mapping[str, Any], variant: _ByteLevel) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=variant.takes_whole))
    if variant.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(variant.pre_tokenizers))
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, metadata, list(vocab))
    _begin_with_bos(tokenizer, metadata, list(vocab), default=variant.begins)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    merges = [(left, right, scores[vocab[left + right]]) for left, right in _derive_merges(vocab)]
    # The best score first, and of one score the longest left part, as in Hugging Face.
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    pairs = [(left, right) for left, right, _ in merges]
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replaced = normalizers.Replace(" ", _SPACE)
    begun_by_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if begun_by_space else replaced
    undone = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undone + ([decoders.Strip(" ", 1, 0)] if begun_by_space else []))
    _add_whole_tokens(tokenizer, metadata, tokens)
    _begin_with_bos(tokenizer, metadata, tokens, default=True)
    return tokenizer


def _gemma(metadata: Mapping[str, Any]) -> Tokenizer:
    # Runs of spaces are plain spaces in the file, but are looked up after the normalizer has replaced them.
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in metadata["tokenizer.ggml.tokens"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_derive_merges(vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_whole_tokens(tokenizer, metadata, tokens)
    _begin_with_bos(tokenizer, metadata, tokens, default=True)
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


def _begin_with_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], *, default: bool) -> None:
    """Puts BOS before a text, where the file asks for it or, without a word from it, where `default` says so."""
    if not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos_id]} $A",
        pair=f"{tokens[bos_id]} $A {tokens[bos_id]} $B",
        special_tokens=[(tokens[bos_id], bos_id)],
    )
