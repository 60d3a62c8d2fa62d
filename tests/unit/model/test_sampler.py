"""Tests of sampler."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from microturn.model.drawn import Sampled
from microturn.model.logits import forbid_others, forbid_others_there
from microturn.model.sampler import choose, draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.sessions.token_counts import TokenCounts
from support.plain_sampler import chi_square, distribution, mask_of, normalized, plain_choice, random_step

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 3.0]
NUM_DRAWS = 3000


def row(
    *, history: Sequence[int] = (), seed: int = 11, position: int = 5, banned_ids: Sequence[int] = (), **options: Any
) -> SamplingRow:
    return SamplingRow(TurnOptions(**options), seed, position, TokenCounts.of(history), banned_ids)


def sample_one(logits: Sequence[float] | Tensor, sampling_row: SamplingRow) -> Sampled:
    (sampled,) = draw(torch.as_tensor(logits)[None], [sampling_row]).sampled()
    return sampled


# ---- the plain reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [2, 5, 97, 1500])
def test_every_choice_is_the_plain_one(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    num_judged = 0
    for _ in range(20):
        logits, rows = random_step(rng, 8, vocab_size)
        token_ids = choose(logits, rows, at_once=8).tolist()
        for token_id, row_logits, sampling_row in zip(token_ids, logits.tolist(), rows, strict=True):
            expected = plain_choice(row_logits, sampling_row)
            if expected.margin > 1e-5:
                num_judged += 1
                assert token_id == expected.token_id, sampling_row.options
    assert num_judged > 110, "too many of the 160 choices were left to rounding errors"


# ---- biases and masks ----------------------------------------------------------------------------------------------


def masked(allowed: Sequence[int], *, vocab_size: int = len(LOGITS), **kwargs: Any) -> SamplingRow:
    return row(**kwargs)._replace(allowed=mask_of(allowed, vocab_size))


def test_a_bias_is_added_to_the_logits_of_its_tokens() -> None:
    assert sample_one(LOGITS, row(logit_bias=((0, 1.5),))).token_id == 0
    assert sample_one(LOGITS, row(logit_bias=((7, -100.0),))).token_id == 0
    assert sample_one(LOGITS, row(logit_bias=((1, 1.4),))).token_id == 7
    probs, _ = distribution([*LOGITS[:1], LOGITS[1] + 1.0, *LOGITS[2:]], row(temperature=1.0))
    counts = Counter(
        sample_one(LOGITS, row(temperature=1.0, logit_bias=((1, 1.0),), position=n)).token_id for n in range(NUM_DRAWS)
    )
    statistic, degrees = chi_square(counts, probs)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_a_biased_token_beyond_the_logits_is_left_out() -> None:
    assert (
        sample_one(
            LOGITS,
            row(
                logit_bias=(
                    (100, 5.0),
                    (0, 2.0),
                )
            ),
        ).token_id
        == 0
    )


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_only_what_the_mask_allows_is_chosen(temperature: float) -> None:
    chosen = {
        sample_one(LOGITS, masked([2, 5, 6], temperature=temperature, position=n)).token_id for n in range(NUM_DRAWS)
    }
    assert chosen == ({2} if temperature == 0 else {2, 5, 6})


def test_what_is_left_is_chosen_as_if_there_were_nothing_else() -> None:
    allowed = [1, 3, 4]
    probs, _ = distribution([LOGITS[at] for at in allowed], row(temperature=0.8))
    counts = Counter(
        allowed.index(sample_one(LOGITS, masked(allowed, temperature=0.8, position=n)).token_id)
        for n in range(NUM_DRAWS)
    )
    statistic, degrees = chi_square(counts, probs)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_filters_look_at_what_is_allowed_alone() -> None:
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        chosen = {sample_one(LOGITS, masked([3, 5], temperature=5, position=n, **filters)).token_id for n in range(50)}
        assert chosen == {3}


@pytest.mark.parametrize("allowed_logit", [-math.inf, math.nan, -3e38, 3e38])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_only_token_that_is_allowed_comes_whatever_its_logit_is(allowed_logit: float, temperature: float) -> None:
    logits = [3e38, math.inf, allowed_logit, -math.inf, math.nan]
    for position in range(20):
        assert sample_one(logits, masked([2], vocab_size=5, temperature=temperature, position=position)).token_id == 2


def test_log_probabilities_are_the_models_own_without_mask_and_bias() -> None:
    plain = sample_one(LOGITS, row(logprobs=True, banned_ids=[7]))
    changed = sample_one(LOGITS, masked([0], logprobs=True, logit_bias=((0, 50.0),)))
    assert changed.token_id == plain.token_id == 0
    assert changed.logprob == plain.logprob


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 97, 1500])
def test_a_device_masks_as_the_host_does(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    rows = [masked(rng.sample(range(vocab_size), rng.randint(1, vocab_size)), vocab_size=vocab_size) for _ in range(5)]
    masks = [None if number == 2 else row.allowed for number, row in enumerate(rows)]
    host = torch.randn(5, vocab_size)
    device = host.clone()
    forbid_others(host, masks)
    forbid_others_there(device, masks)
    assert torch.equal(host, device)
    assert host[2].isfinite().all()


def test_a_mask_is_one_rows_own() -> None:
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    rows = [masked([4]), row(), masked([1, 2], temperature=1.0)]
    for at_once in (1, 3):
        ids = choose(logits, rows, at_once=at_once).tolist()
        assert ids[:2] == [4, 7]
        assert ids[2] in (1, 2)


# ---- greedy --------------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert sample_one(LOGITS, row()).token_id == 7


def test_of_equal_tokens_greedy_takes_the_first() -> None:
    assert sample_one([1.0, 3.0, 3.0], row()).token_id == 1
    assert sample_one([1.0, 3.0, 3.0], row(banned_ids=[0])).token_id == 1


def test_greedy_does_not_look_at_seed_position_or_filters() -> None:
    assert {sample_one(LOGITS, row(seed=n, position=n, top_k=3, top_p=0.1)).token_id for n in range(20)} == {7}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-3])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = [100 * logit for logit in LOGITS]
    tokens = {sample_one(logits, row(temperature=temperature, position=n)).token_id for n in range(20)}
    assert tokens == {7}


# ---- the distribution ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.15},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.8},
        {"temperature": 1.0, "presence_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": -0.4},
        {"temperature": 1.3, "repetition_penalty": 0.7, "frequency_penalty": 0.3, "top_p": 0.9},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_tokens_come_as_often_as_the_options_ask_for(options: dict[str, Any]) -> None:
    history = [7, 7, 7, 2, 6, 6]
    logits = torch.tensor(LOGITS).expand(NUM_DRAWS, -1)
    rows = [row(history=history, seed=3, position=position, **options) for position in range(NUM_DRAWS)]
    counts = Counter(draw(logits, rows).ids.tolist())
    probs, _ = distribution(LOGITS, rows[0])
    statistic, num_free = chi_square(counts, probs)
    # Wilson and Hilferty's normal approximation; four deviations leave out one honest sampler in 30,000.
    limit = max(1, num_free) * (1 - 2 / (9 * max(1, num_free)) + 4 * math.sqrt(2 / (9 * max(1, num_free)))) ** 3
    assert statistic < limit


def test_top_k_of_one_is_greedy() -> None:
    assert {sample_one(LOGITS, row(temperature=5, top_k=1, position=n)).token_id for n in range(50)} == {7}


def test_a_tiny_top_p_leaves_the_likeliest_token() -> None:
    assert {sample_one(LOGITS, row(temperature=5, top_p=1e-6, position=n)).token_id for n in range(50)} == {7}


def test_min_p_of_one_leaves_the_likeliest_tokens() -> None:
    tokens = {sample_one([1.0, 3.0, 3.0], row(temperature=5, min_p=1, position=n)).token_id for n in range(50)}
    assert tokens == {1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 `top_k=2` leaves 4/7 and 3/7: then the first alone reaches `top_p=0.5`."""
    logits = [math.log(prob) for prob in (0.4, 0.3, 0.2, 0.1)]
    tokens = {sample_one(logits, row(temperature=1, top_k=2, top_p=0.5, position=n)).token_id for n in range(50)}
    assert tokens == {0}


def test_a_token_without_probability_never_comes() -> None:
    logits = [float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]
    assert {sample_one(logits, row(temperature=1, position=n)).token_id for n in range(200)} == {1, 3}


# ---- penalties and bans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_penalties_count_for_greedy_too(options: dict[str, float]) -> None:
    assert sample_one(LOGITS, row(**options)).token_id == 7
    assert sample_one(LOGITS, row(history=[7], **options)).token_id == 0


def test_the_frequency_penalty_counts_every_time() -> None:
    assert sample_one(LOGITS, row(history=[7] * 3, frequency_penalty=0.3)).token_id == 7
    assert sample_one(LOGITS, row(history=[7] * 4, frequency_penalty=0.3)).token_id == 0


def test_a_token_that_the_host_does_not_know_yet_counts_too() -> None:
    """It lies on the device only, and comes on top of what the host has counted of the same token."""
    three = row(history=[7] * 3, frequency_penalty=0.3)
    assert sample_one(LOGITS, three._replace(unknown=torch.tensor([6]))).token_id == 7
    assert sample_one(LOGITS, three._replace(unknown=torch.tensor([7]))).token_id == 0
    assert sample_one(LOGITS, row(presence_penalty=2.0)._replace(unknown=torch.tensor([7]))).token_id == 0


def test_tokens_that_the_model_cannot_choose_are_nothing_to_penalize() -> None:
    """A tokenizer may know more tokens than the model's head has."""
    assert sample_one(LOGITS, row(history=[8, 7, 99], presence_penalty=2.0)).token_id == 0


@pytest.mark.parametrize("options", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_what_is_spared_is_as_likely_as_if_it_had_not_been_seen(options: dict[str, float]) -> None:
    spared = row(history=[7, 0, 7], **options)._replace(spared_ids=np.array([7, 99]))
    assert sample_one(LOGITS, spared).token_id == 7
    assert sample_one(LOGITS, spared._replace(unknown=torch.tensor([7]))).token_id == 7
    assert sample_one(LOGITS, spared._replace(spared_ids=np.array([0]))).token_id == 0
    assert sample_one(LOGITS, spared._replace(options=TurnOptions(repetition_penalty=3.0))).token_id == 1


def test_the_presence_penalty_counts_once() -> None:
    assert sample_one(LOGITS, row(history=[7] * 100, presence_penalty=0.9)).token_id == 7


def test_the_repetition_penalty_lowers_negative_logits_too() -> None:
    assert sample_one([-1.0, -1.5], row(history=[0], repetition_penalty=2.0)).token_id == 1


def test_banned_tokens_never_come() -> None:
    assert sample_one(LOGITS, row(banned_ids=[7])).token_id == 0
    tokens = {sample_one(LOGITS, row(temperature=2, banned_ids=[7, 0], position=n)).token_id for n in range(100)}
    assert tokens == {1, 2, 3, 4, 5, 6}


def test_a_ban_holds_against_a_penalty_that_would_reward() -> None:
    assert sample_one(LOGITS, row(history=[7] * 9, banned_ids=[7], frequency_penalty=-100)).token_id != 7


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.5}, {"top_k": 2}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize(
    ("logits", "history", "penalties"),
    [
        (LOGITS, [0, 7], {"repetition_penalty": 1e-300}),
        (LOGITS, [5, 6], {"repetition_penalty": 1e-300}),
        ([math.nan] * 8, [], {}),
        ([math.inf, math.inf, 0.0, math.nan], [], {}),
    ],
)
def test_what_is_no_number_fails_nobody(
    logits: list[float], history: list[int], penalties: dict[str, float], filters: dict[str, Any]
) -> None:
    """No token had a probability, and the exception ended the turns of everybody in the step."""
    sampled = sample_one(logits, row(history=history, temperature=1, banned_ids=[1], **penalties, **filters))
    assert sampled.token_id in {0, *range(2, len(logits))}


# ---- purity --------------------------------------------------------------------------------------------------------


def test_company_changes_nothing() -> None:
    """The same token whoever else is sampled in the step."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    rows = [
        row(),
        row(temperature=1.0, seed=1),
        row(temperature=1.0, seed=2, top_p=0.7, logprobs=True),
        row(temperature=0.8, top_k=9, history=[1, 2, 3], repetition_penalty=1.3),
        row(banned_ids=[int(logits[4].argmax())], logprobs=True),
        row(temperature=1.0, min_p=0.05, position=9),
    ]
    together = draw(logits, rows).sampled()
    alone = [sample_one(row_logits, sampling_row) for row_logits, sampling_row in zip(logits, rows, strict=True)]
    assert together == alone
    assert draw(logits.flip(0), rows[::-1]).sampled() == alone[::-1]


@pytest.mark.parametrize("vocab_size", [3, 300, 5000])
def test_rows_that_are_computed_together_choose_as_alone(vocab_size: int) -> None:
    """To the bit: there is no margin for a rounding error here."""
    rng = random.Random(vocab_size)
    for _ in range(10):
        logits, rows = random_step(rng, 9, vocab_size)
        alone = choose(logits, rows, at_once=1)
        assert choose(logits, rows, at_once=4).equal(alone)
        assert choose(logits.flip(0), rows[::-1], at_once=9).equal(alone.flip(0))


def test_the_logits_are_not_changed() -> None:
    logits = torch.tensor([LOGITS])
    draw(logits, [row(temperature=1, history=[7], presence_penalty=2.0, banned_ids=[0], top_k=2)])
    assert logits.tolist() == [LOGITS]


def test_a_rounding_error_moves_the_choice_at_a_border_only() -> None:
    """Another batch may bring other last bits; the token must not hang on them."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    rows = [row(temperature=1, top_p=0.95, position=position) for position in range(300)]
    exact = draw(logits.expand(300, -1), rows).ids
    rounded = draw((logits * (1 + 1e-6)).expand(300, -1), rows).ids
    assert exact.equal(rounded)


def test_seed_and_position_alone_choose() -> None:
    sampling_row = row(temperature=2.0, seed=5, position=9)
    assert all(sample_one(LOGITS, sampling_row) == sample_one(LOGITS, sampling_row) for _ in range(10))
    assert len({sample_one(LOGITS, row(temperature=2.0, seed=5, position=n)).token_id for n in range(50)}) > 3
    assert len({sample_one(LOGITS, row(temperature=2.0, seed=n, position=5)).token_id for n in range(50)}) > 3


def test_no_rows_give_no_tokens() -> None:
    drawn = draw(torch.empty(0, 8), [])
    assert (drawn.ids.tolist(), drawn.sampled()) == ([], [])


# ---- on a device that nobody waits for -----------------------------------------------------------------------------


def test_the_ids_on_the_device_are_those_that_are_told() -> None:
    logits, rows = random_step(random.Random(0), 12, 97)
    drawn = draw(logits, rows)
    assert drawn.ids.dtype == torch.int64
    assert drawn.ids.tolist() == [sampled.token_id for sampled in drawn.sampled()]
    assert [sampled.logprob is not None for sampled in drawn.sampled()] == [each.options.logprobs for each in rows]


def test_no_value_is_looked_at_on_a_device() -> None:
    """The host would have to wait for it. A meta tensor has none, so here such a look fails."""
    logits, rows = random_step(random.Random(0), 40, 1500)
    assert any(row.unknown is not None and row.options.has_penalties for row in rows)
    rows = [row if row.unknown is None else row._replace(unknown=row.unknown.to("meta")) for row in rows]
    assert choose(logits.to("meta"), rows, at_once=16).is_meta


# ---- log probabilities ---------------------------------------------------------------------------------------------


def test_logprobs_come_only_when_asked_for() -> None:
    assert sample_one(LOGITS, row()).logprob is None


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.3}, {"temperature": 1.0, "top_k": 1}, {"presence_penalty": 3.0, "history": [7]}]
)
def test_a_logprob_is_of_the_models_own_distribution(options: dict[str, Any]) -> None:
    sampled = sample_one(LOGITS, row(logprobs=True, **options))
    probs = normalized([math.exp(logit) for logit in LOGITS])
    assert sampled.logprob == pytest.approx(math.log(probs[sampled.token_id]), abs=1e-5)


def test_the_likeliest_tokens_come_where_they_are_asked_for() -> None:
    probs = normalized([math.exp(logit) for logit in LOGITS])
    rows = [row(), row(logprobs=3, temperature=2.0), row(logprobs=True), row(logprobs=20), row(logprobs=1, history=[7])]
    sampled = draw(torch.tensor([LOGITS] * len(rows)), rows).sampled()
    assert [len(each.top) for each in sampled] == [0, 3, 0, 8, 1]
    assert [each.logprob is None for each in sampled] == [True, False, False, False, False]
    assert [token_id for token_id, _ in sampled[3].top] == [7, 0, 1, 2, 3, 4, 5, 6]
    for each in sampled:
        for token_id, logprob in each.top:
            assert logprob == pytest.approx(math.log(probs[token_id]), abs=1e-5)
    assert sampled[1].top == sampled[3].top[:3]


def test_which_of_equally_likely_tokens_are_told_does_not_depend_on_other_rows() -> None:
    logits = (torch.randn(2, 32_000, generator=torch.Generator().manual_seed(0)) * 6).round() / 2
    few, many = row(logprobs=5), row(logprobs=20)
    beside = draw(logits, [few, many]).sampled()
    assert [len(each.top) for each in beside] == [5, 20]
    alone = [draw(of_row[None], [each]).sampled()[0] for of_row, each in zip(logits, (few, many), strict=True)]
    assert [each.top for each in beside] == [each.top for each in alone]


def test_where_none_asks_no_logits_are_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody pays for what nobody asked for")

    monkeypatch.setattr(torch.Tensor, "log_softmax", refuse)
    assert sample_one(LOGITS, row()).token_id == 7
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "topk", refuse)
    assert sample_one(LOGITS, row(logprobs=True)).logprob is not None
