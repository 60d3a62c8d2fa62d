"""The sampler on a GPU: the choices of a CPU, and nothing waits for them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from microturn.model.sampler import choose, draw
from microturn.model.sampling_columns import sampling_columns
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from support.plain_sampler import plain_choice, random_step


def on_gpu(rows: list[SamplingRow]) -> list[SamplingRow]:
    """The rows, whose unknown tokens lie where they were chosen."""
    return [row if row.unknown is None else row._replace(unknown=row.unknown.cuda()) for row in rows]


@pytest.mark.parametrize(
    ("vocab_size", "num_rows", "num_steps"), [(2, 8, 20), (97, 100, 3), (1501, 8, 20), (50_257, 8, 2)]
)
def test_choices_are_those_of_a_cpu(vocab_size: int, num_rows: int, num_steps: int) -> None:
    rng = random.Random(vocab_size)
    num_judged = 0
    for _ in range(num_steps):
        logits, rows = random_step(rng, num_rows, vocab_size)
        here_all, there_all = draw(logits, rows).sampled(), draw(logits.cuda(), on_gpu(rows)).sampled()
        for row_logits, row, here, there in zip(logits.tolist(), rows, here_all, there_all, strict=True):
            # Where a comparison was close, exponentials that are rounded otherwise may choose another token.
            if plain_choice(row_logits, row).margin > 1e-5:
                num_judged += 1
                assert there.token_id == here.token_id, row.options
                if row.options.logprobs:
                    assert there.logprob == pytest.approx(here.logprob, rel=1e-4, abs=1e-4, nan_ok=True)
    assert num_judged > num_rows * num_steps / 3, "too many choices were left to rounding errors"


def top_p_step(num_rows: int, vocab_size: int) -> tuple[Tensor, list[SamplingRow]]:
    """Logits on the GPU and rows of a step in which all sample, as most do."""
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows))
    options = TurnOptions(temperature=0.8, top_p=0.95)
    return logits.cuda(), [SamplingRow(options, 5, position) for position in range(num_rows)]


def test_a_large_step_is_drawn_as_alone_and_as_on_a_cpu() -> None:
    logits, rows = top_p_step(64, 131_072)
    ids = draw(logits, rows).ids
    assert choose(logits, rows, at_once=1).equal(ids)
    assert choose(logits, rows, at_once=23).equal(ids)
    # Exponentials are rounded otherwise there: a token whose bounds are that close to the random number may be another.
    assert (draw(logits.cpu(), rows).ids != ids.cpu()).sum() <= 1


def test_the_kernels_of_a_draw_can_be_captured() -> None:
    logits, rows = top_p_step(8, 5000)
    from microturn.model.gpu.sampling import draw_filtered  # needs Triton

    columns, greatest = sampling_columns(rows, 5000, logits.device), logits.amax(-1, keepdim=True)
    expected, given = draw_filtered(logits.clone(), greatest, rows, columns), logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = draw_filtered(given, greatest, rows, columns)
    graph.replay()
    assert ids.equal(expected)


@pytest.mark.parametrize("vocab_size", [97, 1024, 50_257])
def test_company_changes_nothing(vocab_size: int) -> None:
    """To the bit, where rows begin at odd addresses too."""
    logits, rows = random_step(random.Random(vocab_size), 20, vocab_size)
    logits, rows = logits.cuda(), on_gpu(rows)
    alone = choose(logits, rows, at_once=1)
    assert choose(logits, rows, at_once=7).equal(alone)
    assert choose(logits.flip(0), rows[::-1], at_once=64).equal(alone.flip(0))


def test_nothing_waits_for_a_choice() -> None:
    logits, rows = random_step(random.Random(0), 100, 1500)
    there, rows = logits.cuda(), on_gpu(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw(there, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.ids.is_cuda
    assert drawn.ids.tolist() == [sampled.token_id for sampled in drawn.sampled()]


def test_who_waits_for_a_choice_does_not_wait_for_what_comes_behind_it() -> None:
    logits, rows = random_step(random.Random(0), 8, 1500)
    drawn = draw(logits.cuda(), on_gpu(rows))
    torch.cuda._sleep(2_000_000_000)  # a second of nothing
    sampled = drawn.sampled()
    assert not torch.cuda.current_stream().query(), "waited for it all"
    assert [each.token_id for each in sampled] == drawn.ids.tolist()
