import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from microturn.errors import InvalidArgument
from microturn.text.encoder import TextEncoder
from microturn.text.model_text import ModelText
from support import tiny_tokenizers as tiny


def test_the_real_models(load_edge) -> None:
    smollm2, gemma3 = load_edge("smollm2").model, load_edge("gemma3").model
    assert (smollm2.vocab_size, gemma3.vocab_size) == (49152, 262144)
    assert smollm2.eos_ids == {2}
    for model in (smollm2, gemma3):
        assert " " in model.encoder.boundaries.openers
        assert model.chat_template().transition("user", "assistant", is_context_empty=False).text


def test_eos_ids_are_those_of_the_generation_config_and_of_the_tokenizer(tmp_path: Path) -> None:
    directory = tiny.save(tiny.byte_level(), tmp_path / "model")
    assert ModelText.from_directory(directory).eos_ids == {1}
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7, "model_type": "llama"}))
    assert ModelText.from_directory(directory).eos_ids == {1, 7}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert ModelText.from_directory(directory).eos_ids == {1, 4, 5}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer in .* cannot be loaded"):
        ModelText.from_directory(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = tiny.save(tiny.byte_level(), tmp_path / "model")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(InvalidArgument, match=r"tokenizer in .* cannot be loaded"):
        ModelText.from_directory(directory)


def test_a_template_that_rewrites_messages_refuses_roles_and_nothing_else(load_edge) -> None:
    edge = load_edge("forgetful")
    with pytest.raises(InvalidArgument, match=r"changes what the message of role 'assistant' says .*without 'role'"):
        edge.model.chat_template()
    context = edge.open()
    context.write("hello there", flush=True)
    assert context.ids == edge.plain_ids("hello there")


def test_a_template_with_other_tokens_than_those_of_the_pieces_refuses_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save(tiny.byte_level(), tmp_path / "model", tiny.TRIMMING)
    encode = TextEncoder.encode
    monkeypatch.setattr(
        TextEncoder, "encode", lambda self, text, *, begins: encode(self, text.replace(" ", "  "), begins=begins)
    )
    with pytest.raises(InvalidArgument, match="gives other ids for a chat in pieces"):
        ModelText.from_directory(directory).chat_template()


def test_a_template_for_one_question_only(tmp_path: Path) -> None:
    source = "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + tiny.TRIMMING
    model = ModelText.from_directory(tiny.save(tiny.byte_level(), tmp_path / "model", source))
    assert model.chat_template().transition("user", "assistant", is_context_empty=False).text


def test_what_a_model_cannot_do_is_logged_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ModelText.from_directory(tiny.save(tiny.crossing(), tmp_path / "model", tiny.FORGETFUL))
    assert "tokens of this model can span words" in caplog.text
    assert "option 'role' is refused" in caplog.text


def test_a_decoder_that_needs_all_ids_at_once_is_refused(tmp_path: Path) -> None:
    """GPT's first decoder writes a space behind every word but the last."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(tiny.CORPUS, trainer)
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    with pytest.raises(InvalidArgument, match="makes text of all ids together"):
        ModelText.from_directory(tiny.save(tokenizer, tmp_path / "model"))


def test_the_directory_is_not_needed_later(tmp_path: Path) -> None:
    directory = tiny.save(tiny.byte_level(), tmp_path / "model", tiny.WITH_TOOLS)
    model = ModelText.from_directory(directory)
    shutil.rmtree(directory)
    assert model.chat_template('[{"name": "x"}]').transition(None, "user", is_context_empty=True).text
