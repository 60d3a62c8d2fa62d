"""A model directory whose chat template has tools: real weights, and a template of the kind that Qwen's have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
    known, config = model_dir / "tokenizer_config.json", directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(known.read_text()), "chat_template": TEMPLATE}))
    shutil.copystat(known, config)  # with the same time, what a server found out at load is known to the next one
    return directory
