"""Oracle 3: rewind and interrupt equal a session in which the dropped tokens had never been there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.model.runner import ModelRunner
from microturn.sessions.history import Checkpoint, History
from microturn.sessions.session import Session
from support import models
from support.driver import Driver, Recorder, asynchronous_runner, model_runner
from support.models import VOCAB_SIZE
from support.oracle import RecordingDriver, stock_logits, tolerance_of

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
    "seed": 1234,
}


def check_rewinds(
    model: PreTrainedModel,
    vocabulary: Sequence[int],
    sampling: dict[str, Any],
    *,
    seed: int,
    num_sessions: int,
    num_rounds: int = 3,
    new_runner: Callable[..., ModelRunner] = model_runner,
) -> None:
    """Sessions at once; each round a turn that is talked over while its prompt is computed, while it answers, or later.

    Raises:
        AssertionError: when what comes behind a cut has other tokens than a session that was told just what is left, or
            logits that differ by more than its tolerance from those of the stock model.
    """
    rng = random.Random(seed)
    driver = RecordingDriver(new_runner(model, page_size=16), page_size=16, max_batch_tokens=24)
    fresh = Driver(model_runner(model, page_size=16), page_size=16)
    histories: list[list[int]] = [[] for _ in range(num_sessions)]
    for number in range(num_rounds):
        given = [rng.choices(vocabulary, k=rng.randint(1, 40)) for _ in histories]
        answers = [
            driver.post(n, given[n], start=number == 0, max_tokens=12, ignore_eos=True, **sampling)[0]
            for n in range(num_sessions)
        ]
        # After some steps, so that prompts are cut within and behind their chunks, and answers that end and that don't.
        new: dict[int, tuple[list[int], int, Recorder]] = {}
        for session in rng.sample(range(num_sessions), num_sessions):
            for _ in range(rng.randint(0, 6)):
                driver.engine.step()
            said = rng.choices(vocabulary, k=rng.randint(1, 20))
            rewind_to = rng.randint(0, len(histories[session]) + len(given[session]) + 14)
            recorder, _ = driver.post(
                session, said, max_tokens=6, rewind_to=rewind_to, on_overlap="interrupt", **sampling
            )
            new[session] = said, rewind_to, recorder
        driver.run()
        for session, (said, rewind_to, recorder) in new.items():
            kept = [*histories[session], *given[session], *answers[session].token_ids][:rewind_to]
            expected = fresh.turn(
                "fresh", [*kept, *said], start=True, end=True, max_tokens=6, ignore_eos=True, **sampling
            )
            assert recorder.token_ids == expected.token_ids
            histories[session] = [*kept, *said, *recorder.token_ids]
            assert recorder.status.context_len == len(histories[session])
            assert recorder.status.usage["cached_tokens"] <= max(0, len(kept) - 1)
            _check_logits(model, driver, session, histories[session], is_greedy=sampling is GREEDY)


def _check_logits(
    model: PreTrainedModel, driver: RecordingDriver, session: int, history: list[int], *, is_greedy: bool
) -> None:
    """The last six tokens of a history were sampled from the stock model's logits."""
    stock, tolerance = stock_logits(model, history), tolerance_of(model)
    for position in range(len(history) - 6, len(history)):
        got = driver.logits[session, position]
        assert (got - stock[position - 1]).abs().max() <= tolerance
        if is_greedy:
            assert stock[position - 1].max() - stock[position - 1, history[position]] <= tolerance


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("seed", "num_sessions"), [(0, 1), (1, 3), (2, 8)])
def test_what_comes_behind_a_cut_is_as_if_nothing_had_stood_there(
    tiny_model: PreTrainedModel, seed: int, num_sessions: int, sampling: dict[str, Any]
) -> None:
    check_rewinds(tiny_model, range(VOCAB_SIZE), sampling, seed=seed, num_sessions=num_sessions, num_rounds=5)


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 0.9, "seed": 1234}], ids=["greedy", "sampled"])
def test_a_cut_while_the_next_token_is_computed_is_no_other(
    tiny_model: PreTrainedModel, sampling: dict[str, Any]
) -> None:
    check_rewinds(
        tiny_model,
        range(VOCAB_SIZE),
        sampling,
        seed=3,
        num_sessions=3,
        num_rounds=4,
        new_runner=asynchronous_runner,
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_real_weights_what_comes_behind_a_cut_is_as_if_nothing_had_stood_there(
    real_model: PreTrainedModel, sampling: dict[str, Any]
) -> None:
    check_rewinds(real_model, range(17, 49152), sampling, seed=0, num_sessions=4)


@pytest.mark.parametrize("rewind_to", [1, 15, 16, 17, 40, 43])
def test_an_answer_is_said_again_from_where_it_was_cut(tiny_model: PreTrainedModel, rewind_to: int) -> None:
    """Without new input, sampled tokens come again as they were: they depend on the position, not on how often."""
    driver = Driver(model_runner(tiny_model), max_batch_tokens=16)
    prompt = [(7 * at) % VOCAB_SIZE for at in range(16)]
    whole = [*prompt, *driver.turn("s", prompt, start=True, max_tokens=28, **SAMPLED).token_ids]
    again = driver.turn("s", max_tokens=len(whole) - rewind_to, rewind_to=rewind_to)
    if rewind_to >= len(prompt):
        assert again.token_ids == whole[rewind_to:]
    else:
        fresh = driver.turn("f", whole[:rewind_to], start=True, max_tokens=len(whole) - rewind_to, **SAMPLED)
        assert again.token_ids == fresh.token_ids


@pytest.mark.parametrize("num_stale", [1, 2])
def test_the_oracle_sees_kv_that_was_not_cut(monkeypatch: pytest.MonkeyPatch, num_stale: int) -> None:
    """A planted mistake: the last tokens behind a cut keep their KV."""
    monkeypatch.setattr(Session, "cut_kv", lambda self, length: self.table.truncate(length + num_stale))
    with pytest.raises(AssertionError):
        check_rewinds(models.grouped_heads(), range(VOCAB_SIZE), GREEDY, seed=1, num_sessions=3, num_rounds=5)


def test_the_oracle_sees_a_cut_at_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: tokens are cut, and one more with them."""
    cut = History.cut

    def cut_more(self: History, position: int) -> Checkpoint:
        return cut(self, max(0, position - 1))

    monkeypatch.setattr(History, "cut", cut_more)
    with pytest.raises(AssertionError):
        check_rewinds(models.grouped_heads(), range(VOCAB_SIZE), GREEDY, seed=1, num_sessions=3, num_rounds=5)
