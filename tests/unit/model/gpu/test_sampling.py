"""The kernels of sampling choose what torch's operations choose: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from microturn.model import sampling_filters
from microturn.model.gpu import sampling
from microturn.model.sampling_columns import sampling_columns
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from support.plain_sampler import random_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = 131_072


@pytest.fixture(autouse=True)
def _infinities_are_no_mistakes() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of quotients that are infinite."""
    with np.errstate(over="ignore"):
        yield


def drawn(logits: Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[int]]:
    """What kernels draw, and what torch's operations draw."""
    logits = logits.to(DEVICE)
    columns, greatest = sampling_columns(rows, logits.shape[-1], DEVICE), logits.amax(-1, keepdim=True)
    by_kernels = sampling.draw_filtered(logits.clone(), greatest, rows, columns)
    by_torch = sampling_filters.draw_filtered(logits, greatest, rows, columns)
    return by_kernels.flatten().tolist(), by_torch.flatten().tolist()


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(2, 40), (97, 60), (1501, 20), (4096, 10), (9001, 10)])
def test_rows_that_may_be_anything_are_drawn_alike(vocab_size: int, num_rows: int) -> None:
    logits, rows = random_step(random.Random(vocab_size), num_rows, vocab_size)
    by_kernels, by_torch = drawn(logits.nan_to_num(), rows)
    assert by_kernels == by_torch
    assert max(by_kernels) < vocab_size


def shape(name: str, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    match name:
        case "flat":
            return torch.zeros(vocab_size)
        case "normal":
            return torch.randn(vocab_size, generator=generator)
        case "two values":
            return (torch.arange(vocab_size) % 3 == 0).float()
        case "one peak":
            return torch.zeros(vocab_size).index_fill_(0, torch.tensor([vocab_size - 2]), 40.0)
        case "steep":  # from 1 to far below what weighs anything
            return torch.linspace(0, -100, vocab_size)[torch.randperm(vocab_size, generator=generator)]
        case _:  # where only few are allowed
            return torch.full((vocab_size,), -torch.inf).index_fill_(0, torch.tensor([3, vocab_size - 1]), -2.5)


SHAPES = ["flat", "normal", "two values", "one peak", "steep", "few"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("vocab_size", [5, 1500, pytest.param(LARGE, id="large")])
def test_any_shape_is_drawn_alike_with_any_filter(name: str, vocab_size: int) -> None:
    if vocab_size == LARGE:
        top_ks, top_ps, min_ps = [0, 50], [1.0, 0.95], [0.0]
    else:
        top_ks, top_ps = [0, 1, vocab_size // 2, vocab_size - 1], [1.0, 1 - 2**-53, 0.95, 0.5, 1e-12]
        min_ps = [0.0, 0.1, 1.0]
    # Each of a filter with each of another one; three at once are drawn at random above.
    filters = [
        (top_k, top_p, min_ps[(k + p) % len(min_ps)])
        for (k, top_k), (p, top_p) in product(enumerate(top_ks), enumerate(top_ps))
    ]
    rows = [
        SamplingRow(TurnOptions(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p), 7, position)
        for position, (top_k, top_p, min_p) in enumerate(filters)
    ]
    by_kernels, by_torch = drawn(shape(name, vocab_size).expand(len(rows), -1), rows)
    assert by_kernels == by_torch


def test_a_filter_that_no_row_wants_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_select", None)
    rows = [SamplingRow(TurnOptions(temperature=1.0, top_k=500), 1, position) for position in range(3)]
    by_kernels, by_torch = drawn(torch.randn(3, 500, generator=torch.Generator().manual_seed(0)), rows)
    assert by_kernels == by_torch
