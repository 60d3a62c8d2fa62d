"""Tests of text.embedded: tokens that a model has no embedding for are text like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from microturn.errors import InvalidArgument
from microturn.text.model_text import ModelText
from support import tiny_tokenizers


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's tokenizer with two tokens that were added behind its vocabulary."""
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<PRE>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<FIM>", special=True)])
    return tiny_tokenizers.save(tokenizer, tmp_path / "model")


def test_what_the_model_does_not_know_is_plain_text(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = ModelText.from_directory(directory)
    num_ids = tiny_tokenizers.byte_level().get_vocab_size()
    assert whole.has_ids_beyond(num_ids)
    assert max(whole.encoder.encode("say <PRE> now", begins=True)) == num_ids
    text = ModelText.from_directory(directory, num_ids)
    assert not text.has_ids_beyond(num_ids)
    ids = text.encoder.encode("say <PRE> now <FIM>", begins=True)
    assert max(ids) < num_ids
    assert "2 tokens were added to the tokenizer and not to the model's embedding" in caplog.text
    assert "<PRE>, <FIM>" in caplog.text


def test_a_tokenizer_of_another_model_is_refused(directory: Path) -> None:
    with pytest.raises(InvalidArgument, match="they are of different models"):
        ModelText.from_directory(directory, 200)
