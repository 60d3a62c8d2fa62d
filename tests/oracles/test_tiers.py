"""Oracle 4: device → host → disk → device is bit-identical, and tokens → device gives equal tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.kv.tensors import KVTensors
from microturn.sessions.session import Session
from support import models
from support.driver import Driver, model_runner
from support.models import VOCAB_SIZE
from support.oracle import check_greedy
from support.tiers import bits_of, counters_of, move_all_out, scramble, settle

PAGE_SIZE = 16

Starter = Callable[..., Driver]


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts engines over models."""
    drivers = []

    def start(model: PreTrainedModel, num_pages: int, max_context: int = 160, **settings: Any) -> Driver:
        runner = model_runner(model, num_pages=num_pages, page_size=PAGE_SIZE)
        sizes = {"num_pages": num_pages, "page_size": PAGE_SIZE, "max_context": max_context}
        drivers.append(Driver(runner, **sizes, max_sessions=1000, **settings))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.engine.stop()


def session_of(driver: Driver, session_id: int) -> Session:
    session = driver.engine._sessions.find(session_id)
    assert session is not None
    return session


def ids(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=num_tokens)


TIERS = pytest.mark.parametrize("tier", ["host", "disk"])


@TIERS
def test_what_comes_back_is_bit_identical(
    tiny_model: PreTrainedModel, start: Starter, tmp_path: Path, tier: str
) -> None:
    _check_what_comes_back(tiny_model, start, tmp_path, tier)


@TIERS
def test_with_real_weights_too(real_model: PreTrainedModel, start: Starter, tmp_path: Path, tier: str) -> None:
    _check_what_comes_back(real_model, start, tmp_path, tier)


def _check_what_comes_back(model: PreTrainedModel, start: Starter, tmp_path: Path, tier: str) -> None:
    settings = {"host_tier_bytes": 1 << 30} if tier == "host" else {"disk_tier_dir": str(tmp_path)}
    driver = start(model, num_pages=64, **settings)
    kv = driver.engine.runner.kv
    rng = random.Random(1)
    histories = {session_id: ids(rng, 33 + 18 * session_id) for session_id in range(3)}
    before = {}
    for session_id, history in histories.items():
        history += driver.turn(session_id, history, start=True, max_tokens=3).token_ids
    for session_id in histories:
        before[session_id] = bits_of(kv, session_of(driver, session_id).table.used_pages)
    move_all_out(driver)
    assert driver.pool.num_free == driver.pool.num_pages
    scramble(kv, range(driver.pool.num_pages))
    for session_id in sorted(histories, reverse=True):
        session = session_of(driver, session_id)
        assert session.stored is not None
        assert (session.stored.image.pages is None) == (tier == "disk")
        num_full = session.kv_len // PAGE_SIZE * kv.groups.num_groups
        answer = driver.turn(session_id, [5], max_tokens=1)
        assert answer.status.usage["computed_tokens"] == 2
        full = bits_of(kv, session.table.used_pages[:num_full])
        first = _first_pages(kv, before[session_id], num_full)
        assert full == first
        histories[session_id] += [5, *answer.token_ids]
        check_greedy(model, histories[session_id], [len(histories[session_id]) - 1])
    assert counters_of(driver).restored == 3


def _first_pages(kv: KVTensors, bits: bytes, num_pages: int) -> bytes:
    """Of what stood in some pages, that of the first ones: each tensor's part in its turn."""
    parts = [part.num_bytes for part in kv.page_parts]
    num_all = len(bits) // sum(parts)
    first, start = b"", 0
    for num_bytes in parts:
        first += bits[start : start + num_pages * num_bytes]
        start += num_all * num_bytes
    return first


def test_computed_again_from_its_tokens_a_session_says_the_same(tiny_model: PreTrainedModel, start: Starter) -> None:
    """Two engines with the same sessions; in one of them every turn begins from tokens."""
    rng = random.Random(2)
    drivers = [start(tiny_model, num_pages=64), start(tiny_model, num_pages=64)]
    for number in range(4):
        for session_id in range(3):
            given = ids(rng, rng.randint(1, 20))
            kept, dropped = (
                driver.turn(session_id, given, start=number == 0, max_tokens=4).token_ids for driver in drivers
            )
            assert kept == dropped
        move_all_out(drivers[1])
    assert counters_of(drivers[0]).dropped == 0
    assert counters_of(drivers[1]).dropped == 12


@pytest.mark.parametrize("host_kib", [4096, 40_000])
def test_five_hundred_parked_sessions_in_a_pool_for_twenty(start: Starter, tmp_path: Path, host_kib: int) -> None:
    """Each one's next turn is right, and none is computed again: most of them in files, or all in host memory."""
    model = models.grouped_heads()
    # A session fills three pages of 16 tokens, 54 KiB.
    driver = start(model, 60, 48, disk_tier_dir=str(tmp_path), host_tier_bytes=host_kib << 10)
    rng = random.Random(host_kib)
    histories: dict[int, list[int]] = {}
    for number in range(3):
        for first in range(0, 500, 4):
            answers = {}
            for session_id in range(first, first + 4):
                given = ids(rng, 12)
                histories.setdefault(session_id, []).extend(given)
                answers[session_id], _ = driver.post(session_id, given, start=number == 0, max_tokens=2)
            while any(not answer.is_done for answer in answers.values()):
                settle(driver)
                driver.engine.step()
            driver.engine.check_integrity()
            for session_id, answer in answers.items():
                assert answer.status.usage["computed_tokens"] == (13 if number == 0 else 14)
                histories[session_id] += answer.token_ids
    for history in histories.values():
        check_greedy(model, history, [12, 13, 26, 27, 40, 41])
    counters = counters_of(driver)
    assert counters.restored >= 950, "they were not away"
    assert (counters.read_from_disk > 0) == (host_kib < 40_000)
    assert counters.dropped == 0
