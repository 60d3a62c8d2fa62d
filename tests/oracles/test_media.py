"""Images and sound through the client's encoder and a session: the tokens of transformers' own multimodal model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor

from microturn.model import runner
from microturn.sessions.inputs import EmbedInput, TokenInput, TurnInput
from microturn.zoo.language_part import LanguagePart
from microturn_client.media import MediaEncoder
from support import media_checkpoints
from support.driver import model_runner
from support.media_checkpoints import PLACEHOLDERS, Processed
from support.media_families import FAMILIES, random_family
from support.oracle import RecordingDriver, check_sampled
from support.whole_model import WholeModel

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_GENERATED = 8
OPTIONS = {"max_tokens": NUM_GENERATED, "ignore_eos": True}


@pytest.mark.parametrize("write", [media_checkpoints.idefics3, media_checkpoints.llava, media_checkpoints.qwen2_audio])
def test_a_session_gives_the_tokens_of_the_whole_model(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Text between media, in chunks, behind an answer, and cut back into the middle of an image or a sound."""
    checkpoint = write(tmp_path / "whole")
    LanguagePart(checkpoint).convert(tmp_path / "language", label="m")
    driver = RecordingDriver(model_runner(runner.load_model(tmp_path / "language")), max_batch_tokens=16)
    encoder, whole = MediaEncoder(checkpoint), WholeModel(checkpoint)
    process = Processed(AutoProcessor.from_pretrained(checkpoint))
    rng = np.random.default_rng(5)
    medium = PLACEHOLDERS[write.__name__]

    prompts = [f"Here {medium} and then {medium} so", f" but {medium} is the end"]
    at: list[tuple[int, TurnInput]] = []
    for number, prompt in enumerate(prompts):
        inputs = process(prompt, rng, begins=number == 0)
        whole.hear(inputs)
        for position, given in _chunks(encoder.pieces(inputs), len(whole.context) - inputs["input_ids"].shape[1]):
            at.append((position, given))
            driver.turn(1, given, start=position == 0, max_tokens=0)
        answer = driver.turn(1, **OPTIONS)
        assert answer.token_ids == whole.generate(NUM_GENERATED)
        whole.say(answer.token_ids)

    # The last medium once more, from the middle of its last chunk on.
    cut, again = next((position, given) for position, given in reversed(at) if isinstance(given, EmbedInput))
    behind = [given for position, given in at if position > cut]
    driver.turn(1, EmbedInput(again.embeds[1:]), rewind_to=cut + 1, max_tokens=0)
    for given in behind:
        driver.turn(1, given, max_tokens=0)
    assert driver.turn(1, **OPTIONS).token_ids == answer.token_ids
    check_sampled(whole.logits(), whole.context, _by_position(driver))
    assert len(driver.logits) >= 2 * NUM_GENERATED


@pytest.mark.parametrize("family", FAMILIES)
def test_more_families_hear_and_see_as_they_do_whole(family: str, tmp_path: Path) -> None:
    model, inputs = random_family(family)
    model.save_pretrained(tmp_path / "whole")
    LanguagePart(tmp_path / "whole").convert(tmp_path / "language", label="m")
    driver = RecordingDriver(model_runner(runner.load_model(tmp_path / "language")), max_batch_tokens=16)
    for position, given in _chunks(MediaEncoder(tmp_path / "whole").pieces(inputs), 0):
        driver.turn(1, given, start=position == 0, max_tokens=0)
    answer = driver.turn(1, max_tokens=1, ignore_eos=True)
    with torch.inference_mode():
        expected = model(**inputs).logits[0]
    check_sampled(expected, [*inputs["input_ids"][0].tolist(), *answer.token_ids], _by_position(driver))


def _by_position(driver: RecordingDriver) -> dict[int, Tensor]:
    return {position: row for (_, position), row in driver.logits.items()}


def _chunks(pieces: list[list[int] | Tensor], first: int) -> list[tuple[int, TurnInput]]:
    """Pieces as a session gets them, each with its position; embeddings three at a time."""
    chunks: list[tuple[int, TurnInput]] = []
    for piece in pieces:
        parts = [piece] if isinstance(piece, list) else piece.split(3)
        for part in parts:
            chunks.append((first, TokenInput(part) if isinstance(part, list) else EmbedInput(part)))
            first += len(part)
    return chunks
