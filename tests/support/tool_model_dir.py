"""Model directories whose chat template has tools, of the kind that Qwen's have: with real weights, and with few."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = """{% if tools %}<|im_start|>system
You may call: {{ tools | tojson }}
A call is <tool_call>{"name": "...", "arguments": {}}</tool_call>.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% else %}{{ '\\n' }}{% endif %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tool_model(model_dir: Path, directory: Path) -> Path:
    """Writes a model's directory with that template; its weights are links."""
    for file in model_dir.iterdir():
        if file.name != "tokenizer_config.json":
            (directory / file.name).symlink_to(file)
    config = directory / "tokenizer_config.json"
    known = model_dir / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(known.read_text()), "chat_template": TEMPLATE}))
    # With the same time, what a server found out at load is remembered for the next one.
    shutil.copystat(known, config)
    return directory


def write_small_tool_model(model_dir: Path, directory: Path) -> Path:
    """The same with the tokenizer of that model and a few random weights: a call takes milliseconds."""
    write_tool_model(model_dir, directory)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).unlink()
    stock = LlamaConfig.from_pretrained(model_dir)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig.from_dict({**stock.to_dict(), **sizes, **heads, "initializer_range": 0.25})
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    for file in directory.iterdir():
        os.utime(file, (0, 0))
    return directory
