"""Tests of load_tests.bench.turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tqdm import tqdm

from load_tests.bench.turns import NUM_INPUT, NUM_OUTPUT, _measure, measured_turns, summary


class CountingTalk:
    """Notes the length of the context before each turn."""

    def __init__(self) -> None:
        self.context_len = 0
        self.before: list[int] = []

    async def turn(self, given: Sequence[int], num_output: int) -> None:
        self.before.append(self.context_len)
        self.context_len += len(given) + num_output

    async def skip(self, tokens: Sequence[int]) -> None:
        self.context_len += len(tokens)

    async def close(self) -> None: ...


class CountingService:
    def __init__(self) -> None:
        self.talks: list[CountingTalk] = []

    def open(self) -> CountingTalk:
        self.talks.append(CountingTalk())
        return self.talks[-1]


def test_sessions_measure_every_turn_and_stateless_requests_a_sample() -> None:
    assert measured_turns("session", 40, 10) == measured_turns("prefix", 40, 10) == list(range(1, 41))
    assert measured_turns("stateless", 45, 20) == [*range(1, 12), 20, 40, 45]
    assert measured_turns("plain", 45, 20) == [*range(1, 12), 20, *range(36, 46)]


def test_a_measured_turn_meets_the_same_context_whatever_was_skipped() -> None:
    for mode in ("session", "stateless", "plain"):
        service, measured = CountingService(), measured_turns(mode, 60, 25)
        with tqdm(disable=True) as progress:
            run = asyncio.run(_measure(service, 2, measured, progress))
        assert list(run) == measured
        for talk in service.talks:
            assert talk.before == [(NUM_INPUT + NUM_OUTPUT) * (turn - 1) for turn in measured]


def test_a_summary_leaves_the_first_turn_out_and_takes_the_last_ten() -> None:
    run = {turn: float(turn) for turn in range(1, 101)}
    assert summary([run], 100) == (6.5, 95.5)
    sampled = {turn: ms for turn, ms in run.items() if turn <= 11 or turn == 100}
    assert summary([sampled, sampled, run], 100) == (6.5, 100.0)
