"""Tests of engine: what a step does on the host does not grow with what a session has been told."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from microturn.model.batch import Batch
from microturn.sessions.inputs import EmbedInput
from support.driver import Driver
from support.fake_runner import HIDDEN_SIZE, VOCAB_SIZE, FakeRunner

LONG, SHORT = 16_000, 160
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
# What the memory of two steps differs by when nothing of it depends on the context.
MOST_BYTES = 1024


class BlindRunner(FakeRunner):
    """Looks at nothing: what a step takes is the engine's own."""

    def run(self, batch: Batch) -> Tensor:
        return torch.zeros(sum(row.wants_logits for row in batch.rows), VOCAB_SIZE)


def tell_ids(driver: Driver, num_tokens: int) -> None:
    driver.post(1, [at % VOCAB_SIZE for at in range(num_tokens)], start=True, max_tokens=0, idle_timeout_s=3600)


def tell_ids_and_embeddings(driver: Driver, num_tokens: int) -> None:
    tell_ids(driver, num_tokens // 2)
    for _ in range(num_tokens // 16):
        driver.post(1, EmbedInput(torch.zeros(8, HIDDEN_SIZE)), max_tokens=0)
        while driver.engine.step():
            pass


def step_bytes(tell: Callable[[Driver, int], None], num_tokens: int, **options: Any) -> int:
    """The most memory that a step which computes one token has at a time, beside what was there."""
    driver = Driver(
        BlindRunner(num_pages=LONG, page_size=4),
        num_pages=LONG,
        page_size=4,
        max_context=LONG + 100,
        max_batch_tokens=4096,
        share_prefixes=True,
    )
    tell(driver, num_tokens)
    driver.post(1, [5], max_tokens=30, **options)
    while not driver.engine.step() or driver.engine._sessions.find(1).running.num_output < 3:  # type: ignore[union-attr]
        pass
    found = []
    tracemalloc.start()
    for _ in range(9):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        driver.engine.step()
        found.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return min(found)  # now and then a list needs more room


@pytest.mark.parametrize("options", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("tell", [tell_ids, tell_ids_and_embeddings])
def test_a_step_needs_no_more_memory_behind_a_long_context(
    tell: Callable[[Driver, int], None], options: dict[str, Any]
) -> None:
    """For each token the ids of all pages were listed anew, and with penalties all ids of the context walked: 4.5 and
    2.8 ms behind 100,000 tokens, for everybody."""
    assert step_bytes(tell, LONG, **options) < step_bytes(tell, SHORT, **options) + MOST_BYTES
