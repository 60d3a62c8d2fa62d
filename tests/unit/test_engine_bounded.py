"""Tests of engine: what sessions without end keep in memory."""

from __future__ import annotations

from typing import Any

import torch

from microturn.turn import EmbedInput
from support.fake_runner import FakeDriver
from support.snapshots import find

# Pages of 4: sinks 4, at least the last 8, and 4 go at a time.
OPTIONS: dict[str, Any] = {"start": True, "overflow": "window", "sink_tokens": 4, "window_tokens": 8}
# The width of a model of 8 billion weights: 16 KB an embedding.
WIDTH = 4096


def new_driver(**kwargs: Any) -> FakeDriver:
    driver = FakeDriver(max_context=40, window_slack=4, **kwargs)
    driver.runner.hidden_size = WIDTH
    return driver


def embeds(turn: int, num_tokens: int = 5) -> EmbedInput:
    """Embeddings [num_tokens, WIDTH] that no other turn has."""
    return EmbedInput(torch.arange(num_tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH) + 10.0 * turn)


def num_embeds(driver: FakeDriver) -> int:
    return sum(len(span.embeds) for span in find(driver).context.embeds)


def test_embeddings_that_no_rewind_reaches_are_not_kept_for_ever() -> None:
    """A windowed session kept every embedding that it had been given, 4 bytes times the hidden size each: 1.5 GB an
    hour of 25 embeddings a second for a width of 4,096.
    """
    driver = new_driver()
    driver.turn(1, [1], **OPTIONS)
    most = []
    for turn in range(80):
        driver.turn(1, embeds(turn), max_tokens=1)
        most.append(num_embeds(driver))
    assert max(most) <= 40 + (1 << 20) // (4 * WIDTH)
    assert max(most[60:]) <= max(most[:60]), "it still grows"


def test_a_session_that_always_has_a_turn_forgets_where_its_turns_stood() -> None:
    """What only a cut far back would need was given up where a session had no turn at all: one whose client sends the
    next turn before the last has ended kept the mark of every turn.
    """
    driver = new_driver()
    driver.post(1, [1], max_tokens=2, **OPTIONS)
    nums_marks = []
    for turn in range(200):
        driver.post(1, [turn % 97], max_tokens=2)
        driver.steps(2)
        nums_marks.append(len(find(driver).history.marks))
        assert find(driver).running is not None
    assert max(nums_marks) <= 40
