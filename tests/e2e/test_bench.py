"""Tests of load_tests.bench: the protocols go through the real server as they say."""

from __future__ import annotations

import asyncio

import pytest
from tqdm import tqdm

from load_tests.bench import beat_level
from load_tests.bench.beat import take_level
from load_tests.bench.beat_level import Level
from load_tests.bench.serving import TALKS, MicroturnServer
from load_tests.bench.talks import SessionTalk
from load_tests.bench.turns import _measure


def test_every_turn_of_a_level_is_accounted_for(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat_level, "BEHIND_S", 60.0)  # a busy machine is no reason to end it early
    level: Level = asyncio.run(take_level(MicroturnServer(server, SessionTalk), 2, level_s=1.0))
    assert len(level.latencies_ms) == 10
    assert level.num_unanswered == 0
    assert min(level.latencies_ms) > 0


@pytest.mark.parametrize("mode", ["session", "whole", "prefix"])
def test_turns_are_taken_in_a_session_and_as_requests(mode: str, server: str) -> None:
    with tqdm(disable=True) as progress:
        run = asyncio.run(_measure(MicroturnServer(server, TALKS[mode]), 2, [1, 3], progress))
    assert list(run) == [1, 3]
    assert min(run.values()) > 0
