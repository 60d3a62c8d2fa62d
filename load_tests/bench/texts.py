"""A long real text that every machine has: the language reference that the interpreter carries for `help()`."""

from __future__ import annotations

import platform
from pathlib import Path
from pydoc_data.topics import topics

from microturn.text.model_text import ModelText

NAME = f"pydoc_data.topics of Python {platform.python_version()}"


def token_ids(model_dir: Path) -> list[int]:
    """The ids of the whole text: prose, tables and code."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return ModelText.from_directory(model_dir).encoder.encode(text, begins=True)
