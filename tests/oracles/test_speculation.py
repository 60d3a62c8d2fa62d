"""Oracles 1, 2 and 6 with speculation: drafts change no logit, no token, and no draw of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from microturn.model.runner import load_model
from microturn.sessions import speculation
from support.driver import Driver, model_runner
from support.oracle import check_incremental

_NUM_RUNS, _NUM_RUNS_FULL = 2, 80


class Recorded:
    """Drafts what a run of the same turns answered without any, up to a place where it is wrong."""

    def __init__(self, contexts: Sequence[Sequence[int]]) -> None:
        self.num_right = 0
        self._contexts = contexts

    def __call__(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        said = list(token_ids)
        for context in self._contexts:
            if list(context[: len(said)]) == said:
                draft = list(context[len(said) : len(said) + num_tokens])
                num_right = len(said) % (len(draft) + 1)
                self.num_right += num_right
                return [*draft[:num_right], *(abs(token_id - 1) for token_id in draft[num_right:])]
        return []


def test_logits_and_greedy_tokens_are_those_of_one_forward_pass(
    attending_model: PreTrainedModel, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(_NUM_RUNS_FULL if full else _NUM_RUNS):

        def run(seed: int = seed, **options: Any) -> list[list[int]]:
            return check_incremental(attending_model, range(2, 90), seed=seed, num_sessions=3, num_turns=4, **options)

        recorded = Recorded(run())
        monkeypatch.setattr(speculation, "look_up", recorded)
        assert run(speculate="ngram") == recorded._contexts
        assert recorded.num_right


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: str) -> PreTrainedModel:
    return load_model(smollm2_dir)


CODE = """\
def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
"""
TEXTS = {
    "code": f"{CODE}\nThe same with a line of documentation in each function:\n\n{CODE}",
    "quotation": "She said: 'the night train to Lisbon leaves at nine from platform 4'. Word by word: 'the night train",
    "prose": "The old lighthouse keeper climbed the stairs every evening and thought of",
}


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.7, "top_k": 40}], ids=str
)
@pytest.mark.parametrize("text", TEXTS)
def test_a_real_model_says_the_same_from_the_same_seed(
    smollm2: PreTrainedModel, smollm2_dir: str, text: str, options: dict[str, Any], full: bool
) -> None:
    """Two sessions at once, in turns of which some are cut back: with speculation, and without it."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    said = {
        speculate: _talk(Driver(model_runner(smollm2)), tokenizer(TEXTS[text]).input_ids, options, speculate, full)
        for speculate in ("off", "ngram")
    }
    (plain, num_drafted), (speculated, num_accepted) = said["off"], said["ngram"]
    assert speculated == plain
    assert num_drafted == 0
    assert num_accepted or text == "prose"


def _talk(
    driver: Driver, prompt: list[int], options: dict[str, Any], speculate: str, full: bool
) -> tuple[list[list[int]], int]:
    """The answers, and how many tokens were accepted from drafts."""
    rng = random.Random(7)
    answers, num_accepted = [], 0
    for number in range(6 if full else 2):
        cut = {} if number == 0 else {"rewind_to": len(prompt) + rng.randint(0, 8)}
        recorders = [
            driver.post(
                session_id,
                prompt if number == 0 else prompt[-rng.randint(3, 12) :],
                start=number == 0,
                max_tokens=48 if full else 24,
                ignore_eos=True,
                seed=session_id,
                speculate=speculate,
                **cut,
                **options,
            )[0]
            for session_id in (1, 2)
        ]
        driver.run()
        answers += [recorder.token_ids for recorder in recorders]
        num_accepted += sum(recorder.status.usage.get("accepted_tokens", 0) for recorder in recorders)
    return answers, num_accepted
