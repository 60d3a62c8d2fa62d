"""The sampler on a GPU: the choices of a CPU, and nothing waits for them."""

from __future__ import annotations

import random

import pytest
import torch

from microturn.model.sampler import choose, draw
from support.plain_sampler import plain_choice, random_step


@pytest.mark.parametrize(
    ("vocab_size", "num_rows", "num_steps"), [(2, 8, 20), (97, 100, 3), (1501, 8, 20), (50_257, 8, 2)]
)
def test_choices_are_those_of_a_cpu(vocab_size: int, num_rows: int, num_steps: int) -> None:
    rng = random.Random(vocab_size)
    num_judged = 0
    for _ in range(num_steps):
        logits, rows = random_step(rng, num_rows, vocab_size)
        on_cpu, on_gpu = draw(logits, rows).sampled(), draw(logits.cuda(), rows).sampled()
        for row_logits, row, here, there in zip(logits.tolist(), rows, on_cpu, on_gpu, strict=True):
            # Where a comparison was close, exponentials that are rounded otherwise may choose another token.
            if plain_choice(row_logits, row).margin > 1e-5:
                num_judged += 1
                assert there.token_id == here.token_id, row.options
                if row.options.logprobs:
                    assert there.logprob == pytest.approx(here.logprob, rel=1e-4, abs=1e-4, nan_ok=True)
    assert num_judged > num_rows * num_steps / 3, "too many choices were left to rounding errors"


@pytest.mark.parametrize("vocab_size", [97, 1024, 50_257])
def test_company_changes_nothing(vocab_size: int) -> None:
    """To the bit, where rows begin at odd addresses too."""
    logits, rows = random_step(random.Random(vocab_size), 20, vocab_size)
    logits = logits.cuda()
    alone = choose(logits, rows, at_once=1)
    assert choose(logits, rows, at_once=7).equal(alone)
    assert choose(logits.flip(0), rows[::-1], at_once=64).equal(alone.flip(0))


def test_nothing_waits_for_a_choice() -> None:
    logits, rows = random_step(random.Random(0), 100, 1500)
    there = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw(there, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.ids.is_cuda
    assert drawn.ids.tolist() == [sampled.token_id for sampled in drawn.sampled()]


def test_who_waits_for_a_choice_does_not_wait_for_what_comes_behind_it() -> None:
    logits, rows = random_step(random.Random(0), 8, 1500)
    drawn = draw(logits.cuda(), rows)
    torch.cuda._sleep(2_000_000_000)  # a second of nothing
    sampled = drawn.sampled()
    assert not torch.cuda.current_stream().query(), "waited for it all"
    assert [each.token_id for each in sampled] == drawn.ids.tolist()
