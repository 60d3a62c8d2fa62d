"""The kinds of tokenizers and templates that models have: two real ones, and tiny ones of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from microturn.text.model_text import ModelText
from microturn.zoo.store import resolve_model
from support import tiny_tokenizers as tiny
from support.text_edge import TextEdge

_TINY = {
    "byte_level": (tiny.byte_level, tiny.TRIMMING, True),
    "sentence_piece": (tiny.sentence_piece, tiny.ALTERNATING, True),
    "metaspace": (tiny.metaspace, tiny.EATING, True),
    "spelled_out": (tiny.byte_level, tiny.SPELLED_OUT, True),
    "crossing": (tiny.crossing, tiny.TRIMMING, True),
    "with_tools": (tiny.byte_level, tiny.WITH_TOOLS, True),
    "tools_as_json": (tiny.byte_level, tiny.TOOLS_AS_JSON, True),
    "plain": (tiny.word_piece, None, False),
    "forgetful": (tiny.byte_level, tiny.FORGETFUL, True),
}


@pytest.fixture(scope="session")
def load_edge(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextEdge]:
    """Loads a model's text by name, once."""
    loaded: dict[str, TextEdge] = {}

    def load(name: str) -> TextEdge:
        if name not in loaded:
            directory, has_system = prepare(name, tmp_path_factory.mktemp("models") / name)
            loaded[name] = TextEdge(
                ModelText.from_directory(directory), AutoTokenizer.from_pretrained(directory), has_system=has_system
            )
        return loaded[name]

    return load


def prepare(name: str, directory: Path) -> tuple[Path, bool]:
    if name == "smollm2":
        return resolve_model("smollm2-135m"), True
    if name == "gemma3":  # a base model: give it the kind of template that its relatives for chats have
        directory.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).symlink_to(resolve_model("gemma3-270m") / file)
        (directory / "chat_template.jinja").write_text(tiny.TAKING_TURNS)
        return directory, False
    make, template, has_system = _TINY[name]
    return tiny.save(make(), directory, template), has_system


@pytest.fixture(
    scope="session",
    params=["smollm2", "gemma3", "byte_level", "spelled_out", "sentence_piece", "metaspace", "crossing"],
)
def edge(request: pytest.FixtureRequest, load_edge: Callable[[str], TextEdge]) -> TextEdge:
    return load_edge(request.param)
