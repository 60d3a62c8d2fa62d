from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from microturn.errors import InvalidArgument
from microturn.zoo.gguf_tokenizer import write_tokenizer
from support import gguf_files

TEXTS = [
    "hello hello  hello   ",
    "  a line\n\nand another\n\n\n",
    "12 apples, 3456 pears, 7.89",
    "👩‍👩‍👧 café ☕",
    "日本語 and 本",
    "tab\there, carriage\r\nreturn, nul\x00",
    "",
]


def _metadata(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def _tokenizer_of(write: Callable[[Path], object], path: Path) -> PreTrainedTokenizerBase:
    write(path / "m.gguf")
    write_tokenizer(_metadata(path / "m.gguf"), path, max_len=256)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return _tokenizer_of(gguf_files.write_llama, tmp_path_factory.mktemp("smollm"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return _tokenizer_of(gguf_files.write_gemma3, tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["smollm", "gemma"])
def test_decoding_gives_the_text_back(family: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(family)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_smollm_merges_letters_and_keeps_digits_apart(smollm: PreTrainedTokenizerBase) -> None:
    assert smollm.tokenize("hello hello 12") == ["hello", "Ġhello", "Ġ", "1", "2"]


def test_gemma_derives_its_merges_from_the_vocabulary(gemma: PreTrainedTokenizerBase) -> None:
    assert gemma.tokenize("hello hello") == ["hello", "▁hello"]
    assert gemma.tokenize("hell yell") == ["hell", "▁", "y", "e", "ll"]


def test_a_run_of_spaces_is_gemmas_token_for_it(gemma: PreTrainedTokenizerBase) -> None:
    ids = gemma("b   b\n\nb", add_special_tokens=False).input_ids
    tokens = [gguf_files.GEMMA_VOCABULARY[token_id][0] for token_id in ids]
    assert tokens == ["b", "   ", "b", "\n\n", "b"]


def test_what_gemma_has_no_token_for_is_spelled_in_bytes(gemma: PreTrainedTokenizerBase) -> None:
    assert gemma.tokenize("é") == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("family", ["smollm", "gemma"])
def test_control_tokens_are_one_id_and_special(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(family)
    vocabulary = {"smollm": gguf_files.SMOLLM_VOCABULARY, "gemma": gguf_files.GEMMA_VOCABULARY}[family]
    assert len(tokenizer) == len(vocabulary)
    for token_id, (token, kind) in enumerate(vocabulary):
        if kind == gguf_files.CONTROL:
            assert tokenizer(f"a{token}b", add_special_tokens=False).input_ids[1] == token_id
            assert tokenizer.decode([token_id], skip_special_tokens=True) == ""


def test_only_gemma_begins_with_bos(smollm: PreTrainedTokenizerBase, gemma: PreTrainedTokenizerBase) -> None:
    assert smollm("").input_ids == []
    assert gemma("").input_ids == [gemma.bos_token_id] == [2]


def test_the_special_tokens_and_the_template_come_along(
    smollm: PreTrainedTokenizerBase, gemma: PreTrainedTokenizerBase
) -> None:
    assert (smollm.bos_token, smollm.eos_token, smollm.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (gemma.bos_token, gemma.eos_token, gemma.pad_token) == ("<bos>", "<eos>", "<pad>")
    assert smollm.model_max_length == 256
    assert smollm.chat_template == gguf_files.CHAT_TEMPLATE
    assert gemma.chat_template is None


def test_the_pipeline_is_that_of_the_original_tokenizer_file(smollm: PreTrainedTokenizerBase) -> None:
    """The family's own class would load, and silently drop the digits; see ``tokenizer_class``."""
    pipeline = json.loads(smollm.backend_tokenizer.to_str())
    assert pipeline["pre_tokenizer"]["pretokenizers"] == [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    assert pipeline["normalizer"] is None
    assert smollm("hello").input_ids == smollm("hello", add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    "write",
    [partial(gguf_files.write_qwen, model_type="qwen2"), gguf_files.write_llama3, gguf_files.write_mistral],
    ids=["qwen2", "llama3", "mistral"],
)
def test_other_families_encode_as_transformers_reads_them_from_the_file(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    """But for what transformers leaves out, see the next tests."""
    tokenizer = _tokenizer_of(write, tmp_path)
    alone = tmp_path / "alone"  # or transformers would read our tokenizer.json
    alone.mkdir()
    stock = AutoTokenizer.from_pretrained(alone, gguf_file=str((tmp_path / "m.gguf").rename(alone / "m.gguf")))
    for text in [*(text.lstrip(" ") for text in TEXTS), "hello", "it's IT'S 12345"]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == stock(text, add_special_tokens=False).input_ids, text
        assert tokenizer.decode(ids) == text


def test_mistral_has_one_space_more_at_the_beginning_and_after_special_tokens(tmp_path: Path) -> None:
    """As llama.cpp and the model's own tokenizer.json do."""
    tokenizer = _tokenizer_of(gguf_files.write_mistral, tmp_path)
    assert tokenizer.tokenize("hello</s>hello") == ["▁h", "e", "llo", "</s>", "▁h", "e", "llo"]
    assert tokenizer.tokenize(" hello") == ["▁", "▁h", "e", "llo"]


def test_qwen_composes_unicode(tmp_path: Path) -> None:
    tokenizer = _tokenizer_of(partial(gguf_files.write_qwen, model_type="qwen2"), tmp_path)
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids


def test_llama3_takes_a_word_that_is_a_token_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "SMOLLM_MERGES", ["l l"])
    tokenizer = _tokenizer_of(gguf_files.write_llama3, tmp_path)
    assert tokenizer.tokenize("hello") == ["hello"]
    assert tokenizer.tokenize("hellohell") == ["h", "e", "ll", "o", "h", "e", "ll"]


@pytest.mark.parametrize("asked", [None, True, False])
def test_bos_is_where_the_file_or_else_the_family_says(tmp_path: Path, asked: bool | None) -> None:
    gguf_files.write_llama3(tmp_path / "m.gguf")
    metadata = _metadata(tmp_path / "m.gguf")
    if asked is not None:
        metadata["tokenizer.ggml.add_bos_token"] = asked
    write_tokenizer(metadata, tmp_path, max_len=256)
    assert AutoTokenizer.from_pretrained(tmp_path)("").input_ids == ([] if asked is False else [1])


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    gguf_files.write_llama(tmp_path / "m.gguf")
    metadata = _metadata(tmp_path / "m.gguf") | {"tokenizer.ggml.pre": "dbrx"}
    with pytest.raises(
        InvalidArgument,
        match="gpt2/dbrx is not supported, llama/default and gpt2/smollm, gpt2/qwen2, gpt2/llama-bpe are",
    ):
        write_tokenizer(metadata, tmp_path, max_len=256)
