"""A model directory that a server loads at once: a tiny random Llama with a byte-level tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support import tiny_tokenizers


def write_tiny_model(directory: Path) -> Path:
    """Writes the model; its weights are wide, so that a position off by one changes a token."""
    tokenizer = tiny_tokenizers.byte_level()
    tiny_tokenizers.save(tokenizer, directory)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    for file in directory.iterdir():
        os.utime(file, (0, 0))  # with the same times, what a server found out at load is remembered for the next one
    return directory
