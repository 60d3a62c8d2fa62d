"""Tests of sampling_columns."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from microturn.model.sampling_columns import sampling_columns, uniform
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from support import plain_sampler
from support.plain_sampler import chi_square


def test_a_row_has_its_options_and_a_disabled_filter_is_infinite() -> None:
    some = TurnOptions(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    rows = [SamplingRow(TurnOptions(top_k=100), 3, 9), SamplingRow(some, 4, 8)]
    columns = sampling_columns(rows, 100, torch.device("cpu"))
    assert {column.shape for column in columns} == {(2, 1)}
    assert columns.top_k.flatten().tolist() == [math.inf, 40]
    assert columns.top_p.flatten().tolist() == [math.inf, 0.9]
    assert columns.min_p.flatten().tolist() == [0, 0.1]
    assert columns.repetition_penalty.flatten().tolist() == [1, 1.2]
    assert columns.of_rows(1, 2).temperature.tolist() == [[0.7]]
    assert columns.dice.flatten().tolist() == [plain_sampler.uniform(3, 9), plain_sampler.uniform(4, 8)]


def test_uniform_numbers_are_those_of_plain_integers() -> None:
    rng = random.Random(0)
    seeds = [0, 2**63 - 1, *(rng.randrange(2**63) for _ in range(1000))]
    positions = [0, 2**40, *(rng.randrange(2**31) for _ in range(1000))]
    assert uniform(seeds, positions).tolist() == list(map(plain_sampler.uniform, seeds, positions))


def test_uniform_numbers_are_in_the_half_open_interval() -> None:
    for seed in (0, 1, 2**63 - 1):
        values = uniform([seed] * 1002, [*range(1000), 2**31, 2**40])
        assert 0 <= values.min() <= values.max() < 1


@pytest.mark.parametrize("along", ["position", "seed"])
def test_uniform_numbers_are_spread_evenly_and_do_not_follow_each_other(along: str) -> None:
    num = 20_000
    same, counted = [7] * num, range(num)
    values = (uniform(same, counted) if along == "position" else uniform(counted, same)).tolist()
    counts = Counter(int(value * 20) for value in values)
    statistic, _ = chi_square(counts, [1 / 20] * 20)
    assert statistic < 60  # of 19 degrees of freedom: one in 200,000
    mean = sum(values) / num
    covariance = sum((a - mean) * (b - mean) for a, b in pairwise(values)) / num
    assert abs(covariance * 12) < 5 / math.sqrt(num)


@pytest.mark.parametrize(
    ("seed", "position", "value"),
    [
        (0, 0, 0.6524484863740322),
        (0, 1, 0.03401170130434639),
        (42, 7, 0.08603176010658542),
        (2**63 - 1, 2**31, 0.45017658843051855),
    ],
)
def test_uniform_numbers_never_change(seed: int, position: int, value: float) -> None:
    """A session that is restored from a snapshot, or moves to another worker, must go on identically."""
    assert uniform([seed], [position]).tolist() == [value]
