"""Tests of snapshots.snapshot."""

from __future__ import annotations

import json
import time

import pytest

from microturn.sessions.environment import next_epoch
from microturn.sessions.ownership import KeyHash
from microturn.snapshots.snapshot import Header


@pytest.mark.parametrize("session_id", [5, "5", 2**63 - 1, 'a "quoted" ключ\n'])
def test_a_header_comes_back_as_it_was(session_id: int | str) -> None:
    header = Header(session_id, 17, "ab" * 16, 1.8e9 + 0.125, KeyHash.of("ours"), None)
    again = Header.from_json(json.loads(json.dumps(header.as_json())))
    assert again == header
    assert type(again.session_id) is type(session_id)
    assert again.key.matches("ours")


def test_the_key_itself_is_not_written() -> None:
    assert "our secret" not in json.dumps(Header(1, 1, "", 0.0, KeyHash.of("our secret"), None).as_json())


def test_a_later_epoch_is_higher() -> None:
    now_ms = time.time_ns() // 1_000_000
    assert next_epoch() >= now_ms
    first = next_epoch(now_ms + 1_000_000)
    assert first == now_ms + 1_000_001
    assert next_epoch(first) > first
