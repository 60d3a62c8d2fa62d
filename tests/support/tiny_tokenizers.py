"""Tokenizers of the kinds that models have, trained on a few sentences, and chat templates of the kinds that they have.

The templates are written for these tests; each has one habit of the family that it is named after.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it? the dog sleeps and the fox runs on and on.",
    "user and assistant and system and tool\n\nuser said: hello there, how are you today?\n\nhello there",
    "你好，世界。今天天气很好，我们去公园吧！你们去吗？ 我们也去。",
    "naïve café straße ÉCOLE über 12345 67890 3.14 (yes) [no] {maybe} <b>bold</b>  two  spaces   three\n\n\n",
    "[INST] hello [/INST] hello there [INST] what is it [/INST] it is the end of the day",
] * 8
_SPACE = "▁"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TRIMMING = """{{ bos_token }}{% for message in messages -%}
<|head|>{{ message.role }}<|/head|>

{{ message.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt -%}
<|head|>assistant<|/head|>

{% endif %}"""

ALTERNATING = """{% if messages[0].role == 'system' -%}
{% set rules = '((' ~ messages[0].content ~ '))\n\n' %}{% set messages = messages[1:] %}{% else %}{% set rules = '' %}
{%- endif %}{{ bos_token }}{% for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant take turns') }}
{%- endif %}{% if message.role == 'user' -%}
[INST] {{ rules if loop.first }}{{ message.content }} [/INST]{% else -%}
{{ ' ' ~ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""

TAKING_TURNS = """{{ bos_token }}{% for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant take turns') }}
{%- endif %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

FORGETFUL = """{% for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif -%}
<|head|>{{ message.role }}
{{ content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|head|>assistant
{% endif %}"""

SPELLED_OUT = """{{ bos_token }}{% for message in messages -%}
|{{ message.role | upper }}:
{{ message.content | trim }}/b>{% endfor %}{% if add_generation_prompt %}|ASSISTANT:
{% endif %}"""

EATING = """{% for message in messages -%}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

WITH_TOOLS = """{% for message in messages %}{% if loop.first and tools %}<|head|>system
You have: {{ tools | tojson }}<|end|>
{% endif %}<|head|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|head|>assistant
{% endif %}"""

TOOLS_AS_JSON = WITH_TOOLS.replace(
    "{{ message.content }}", "{{ message.content | tojson if message.role == 'tool' else message.content }}"
)

_SPECIALS = ["<s>", "</s>", "<|head|>", "<|/head|>", "<|end|>"]


def byte_level(vocab_size: int = 700) -> Tokenizer:
    """Byte-level BPE with the regular expression of Llama 3 and a BOS; `vocab_size` tokens at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LETTERS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=_SPECIALS))
    _put_bos(tokenizer)
    return tokenizer


def crossing() -> Tokenizer:
    """Byte-level BPE whose tokens go across words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=_SPECIALS))
    return tokenizer


def sentence_piece() -> Tokenizer:
    """BPE with byte fallback as Llama 2 has it: a normalizer puts a space before every text, the decoder drops it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(tokenizer, trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *_SPECIALS, *single_bytes]))
    plain = Tokenizer(tokenizer.model)  # without the single bytes as added tokens
    plain.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    plain.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ["<unk>", *_SPECIALS]])
    _put_bos(plain)
    return plain


def metaspace() -> Tokenizer:
    """Unigram with a space before the first text only, and special tokens that eat whitespace, as Phi 3 has them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    eating = [AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "assistant", "system", "tool")]
    specials = ["<unk>", *_SPECIALS, *eating]
    _train(tokenizer, trainers.UnigramTrainer(vocab_size=400, special_tokens=specials, unk_token="<unk>"))
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece, which knows words only."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", *_SPECIALS]))
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, template: str | None = None) -> Path:
    """Writes a tokenizer as a model directory has it."""
    directory.mkdir()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(CORPUS, trainer)


def _put_bos(tokenizer: Tokenizer) -> None:
    bos_id = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
