"""Tests of engine, of a model of which two groups of layers see five tokens, beside one that sees all."""

from __future__ import annotations

from typing import Any

import pytest

from microturn.engine.wiring import build_engine
from microturn.errors import InvalidArgument
from microturn.kv.pool import PagePool
from microturn.kv.window import Window
from microturn.settings import Settings
from support.driver import IdsOnly
from support.fake_runner import FakeDriver, FakeRunner, expected_tokens

LAYER_WINDOW = 5
SLACK = 8
PAGE_SIZE = 4


def new_driver(**settings: Any) -> FakeDriver:
    return FakeDriver(window=LAYER_WINDOW, window_slack=SLACK, **settings)


def num_used(driver: FakeDriver) -> int:
    return driver.pool.num_pages - driver.pool.num_free


def test_one_context_must_fit_the_pool_with_every_group_of_layers() -> None:
    """A turn gives nothing up before it ends, and one turn may be a whole context."""
    runner = FakeRunner(num_pages=8, page_size=PAGE_SIZE, window=LAYER_WINDOW)
    arguments: dict[str, Any] = {"max_context": 32, "new_codec": lambda _: IdsOnly()}
    build_engine(Settings(page_size=PAGE_SIZE), runner, PagePool(24, PAGE_SIZE), **arguments)
    with pytest.raises(InvalidArgument, match="does not hold one context of 32 tokens"):
        build_engine(Settings(page_size=PAGE_SIZE), runner, PagePool(23, PAGE_SIZE), **arguments)


def test_a_turn_gives_up_nothing_before_it_ends() -> None:
    driver = new_driver(max_batch_tokens=8)
    driver.turn(1, range(20), start=True, max_tokens=0)
    before = num_used(driver)
    _, turn = driver.post(1, range(40), max_tokens=30)
    driver.steps(20)
    assert num_used(driver) >= before + 3 * 12
    driver.engine.cancel(turn)
    driver.run()
    again = driver.turn(1, [7], max_tokens=1)
    assert again.status.usage["cached_tokens"] == 19, "what was before the turn is as it was"
    assert again.token_ids == expected_tokens([*range(20), 7], 1)


def test_when_it_has_ended_all_goes_that_nobody_will_see() -> None:
    driver = new_driver()
    driver.turn(1, range(60), start=True, max_tokens=1)
    # Before the answer at 60 five tokens are seen and eight may be cut; in whole pages from 44 on.
    assert num_used(driver) == 15 + 2 * 4


def test_a_last_answer_is_kept_until_the_next_turn_begins() -> None:
    """Whoever talks over it goes back into it, and has nothing computed again."""
    driver = new_driver()
    answer = driver.turn(1, range(20), start=True, max_tokens=40).token_ids
    assert num_used(driver) == 15 + 2 * (15 - 1)
    cut = driver.turn(1, [9], rewind_to=25, max_tokens=2)
    assert cut.token_ids == expected_tokens([*range(20), *answer[:5], 9], 2)
    assert cut.status.usage["cached_tokens"] == 24
    driver.turn(1, range(40), max_tokens=1)
    driver.turn(1, [8], max_tokens=1)
    back = driver.turn(1, [9], rewind_to=22, max_tokens=2)
    assert back.token_ids == expected_tokens([*range(20), *answer[:2], 9], 2)
    assert back.status.usage["cached_tokens"] == 0, "further back all is computed again"


@pytest.mark.parametrize("window", [Window(4, 12, 4), Window(4, 8, 4)], ids=["longer", "hardly longer"])
def test_beside_a_sessions_window_memory_stays_flat(window: Window) -> None:
    """Where the session's window is hardly longer than that of the layers, they keep what it shows."""
    driver = FakeDriver(window=LAYER_WINDOW, window_slack=window.slack, max_context=60)
    options = {"overflow": "window", "sink_tokens": window.num_sinks, "window_tokens": window.length}
    history: list[int] = []
    used = []
    for number in range(60):
        given = [number, number + 1, number + 2]
        answer = driver.turn(1, given, start=number == 0, max_tokens=2, **(options if number == 0 else {}))
        history += given
        assert answer.token_ids == expected_tokens(history, 2, window=window)
        history += answer.token_ids
        used.append(num_used(driver))
    num_kept = -(-window.max_kept // PAGE_SIZE)
    assert max(used) <= 3 * num_kept
    assert max(used[30:]) == max(used[20:30])
    if window.length >= LAYER_WINDOW + PAGE_SIZE:
        assert max(used) < 3 * num_kept - 2, "the layers kept no less than the session"


def test_who_begins_with_a_part_of_a_first_prompt_shares_what_is_seen_behind_it() -> None:
    driver = new_driver(share_prefixes=True)
    driver.turn(1, range(40), start=True, max_tokens=1)
    other = driver.turn(2, [*range(22), 50, 51], start=True, max_tokens=1)
    assert other.status.usage["cached_tokens"] == 20
    assert other.token_ids == expected_tokens([*range(22), 50, 51], 1)
