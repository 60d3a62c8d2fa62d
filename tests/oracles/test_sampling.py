"""Seeded sampling depends on the session alone: not on company, not on how it is cut into turns."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from support import models
from support.driver import Driver, model_runner
from support.models import VOCAB_SIZE

SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "seed": 1234}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        names = ["grouped_heads", *models.real_names(metafunc.config)]
        metafunc.parametrize("model", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    return models.by_name(request.param, device).to(device)


def test_seeded_sampling_is_the_same_alone_and_in_company(model: PreTrainedModel) -> None:
    prompt = [(7 * at) % VOCAB_SIZE for at in range(40)]
    alone = Driver(model_runner(model)).turn("s", prompt, start=True, max_tokens=24, ignore_eos=True, **SAMPLING)
    driver = Driver(model_runner(model), max_batch_tokens=16)
    for number in range(5):
        driver.post(number + 1, prompt[number:], start=True, max_tokens=30, temperature=1.5)
        driver.engine.step()
    company, _ = driver.post("s", prompt, start=True, max_tokens=24, ignore_eos=True, **SAMPLING)
    driver.run()
    assert company.token_ids == alone.token_ids
    assert len(set(alone.token_ids)) > 5, "the text is degenerate and shows nothing"


def test_seeded_sampling_is_the_same_in_one_turn_and_in_several(model: PreTrainedModel) -> None:
    prompt = [(7 * at) % VOCAB_SIZE for at in range(40)]
    whole = Driver(model_runner(model)).turn("s", prompt, start=True, max_tokens=24, ignore_eos=True, **SAMPLING)
    driver = Driver(model_runner(model))
    parts = driver.turn("s", prompt, start=True, max_tokens=5, ignore_eos=True, **SAMPLING).token_ids
    for max_tokens in (1, 8, 10):
        parts += driver.turn("s", max_tokens=max_tokens).token_ids
    assert parts == whole.token_ids


def test_a_drawn_seed_is_told_and_gives_the_same_text_again(model: PreTrainedModel) -> None:
    driver = Driver(model_runner(model))
    prompt = [3, 5, 8, 13]
    first = driver.turn("a", prompt, start=True, max_tokens=12, temperature=1.0, ignore_eos=True)
    other = driver.turn("b", prompt, start=True, max_tokens=12, temperature=1.0, ignore_eos=True)
    again = driver.turn(
        "c", prompt, start=True, max_tokens=12, temperature=1.0, ignore_eos=True, seed=first.status.seed
    )
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids
