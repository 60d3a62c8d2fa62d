"""Tests of engine: what sessions without end keep in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from microturn.kv.window import Window
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver, expected_tokens
from support.held_text import HoldsText
from support.snapshots import RESUME, copied_kv, find, saved
from support.tiers import settle

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


def with_held_text(num_turns: int, **settings: Any) -> FakeDriver:
    """A session that was told two digits with each turn, behind one token, and holds them."""
    driver = FakeDriver(max_context=1024, num_pages=512, new_codec=lambda _: HoldsText(), **settings)
    driver.turn(1, [5], start=True, max_tokens=0)
    for turn in range(num_turns):
        driver.turn(1, TextInput(f"{turn % 100:02}"), max_tokens=0)
    return driver


def test_text_that_is_held_is_kept_once_and_counted() -> None:
    """Each micro-turn kept all the text that was held so far: some hours of a script without spaces took 513 MB, and
    nobody was charged for them.
    """
    num_turns = 200
    driver = with_held_text(num_turns)
    session, accounts = find(driver), driver.engine._sessions.accounts
    assert sum(len(mark.text_state) for mark in session.history.marks) <= 2 * num_turns
    assert len(session.history.marks) == 2
    assert accounts.bytes_of(session) == accounts.bytes_of(find(with_held_text(0))) + 4 * 2 * num_turns
    assert accounts.of_tenant(None) == accounts.bytes_of(session)


def test_held_text_that_is_refused_leaves_what_was_held_before_it() -> None:
    unlimited = with_held_text(2)
    limit = unlimited.engine._sessions.accounts.bytes_of(find(unlimited), 4)
    driver = with_held_text(2, max_session_bytes=limit)
    assert driver.turn(1, TextInput("9" * limit), max_tokens=0).code == "RESOURCE_EXHAUSTED"
    expected = expected_tokens([5, *map(ord, "0001")], 1)
    assert driver.turn(1, max_tokens=1).token_ids == expected
    assert driver.turn(1, max_tokens=1, rewind_to=1).token_ids == expected


# ---- what is forgotten ---------------------------------------------------------------------------------------------


WINDOW = Window(num_sinks=4, length=8, slack=4)


def long_session(driver: FakeDriver, num_turns: int = 20, **values: Any) -> list[int]:
    """Session 1, of ids alone; what it has been told and has said."""
    history: list[int] = []
    for turn in range(num_turns):
        asked = {**OPTIONS, **values} if turn == 0 else {}
        history += [turn, turn + 1]
        history += driver.turn(1, [turn, turn + 1], max_tokens=2, **asked).token_ids
    return history


def lose_kv(driver: FakeDriver, session_id: SessionId = 1) -> None:
    """Another session needs the whole pool, and there is no other tier."""
    num_tokens = driver.pool.num_pages * 4 - 1
    other = driver.turn(99, [5] * num_tokens, start=True, end=True, max_tokens=1)
    assert other.error is None
    assert find(driver, session_id).kv_place == "tokens"


def go_on(driver: FakeDriver, history: list[int], *, rebuilt: bool, session_id: SessionId = 1, **values: Any) -> None:
    """A turn that must say what follows from the history, whatever of it was computed again; it is added."""
    answer = driver.turn(session_id, [7, 8], max_tokens=3, **values)
    history += [7, 8]
    assert answer.token_ids == expected_tokens(history, 3, window=WINDOW)
    assert (answer.status.context_len, answer.status.rebuilt) == (len(history) + 3, rebuilt)
    history += answer.token_ids


def test_behind_the_window_nothing_stays_but_counts() -> None:
    """2,000 turns, as of a session of hours: ids, embeddings and marks are as few at its end as at its beginning."""
    driver = new_driver(history_bytes=0, share_prefixes=True)
    driver.runner.hidden_size = 4
    driver.turn(1, [1], **OPTIONS)
    kept = []
    for turn in range(2000):
        given = TokenInput((turn % 97,)) if turn % 3 else EmbedInput(torch.full((3, 4), float(turn)))
        driver.post(1, given, max_tokens=1)
        while driver.engine.step():
            pass
        session = find(driver)
        context, table = session.context, driver.engine._sessions
        sizes = len(context.kept_ids()), len(context.embeds), len(session.history.marks), context.num_bytes
        kept.append((*sizes, len(session.results.kept()), len(table._expiries), len(table._parked)))
    early, late = (tuple(map(max, zip(*part, strict=True))) for part in (kept[:200], kept[200:]))
    assert late <= early, "it still grows"
    assert len(find(driver).context) > 4000
    assert max(sizes[0] for sizes in kept) <= WINDOW.max_kept + 2 * WINDOW.slack
    driver.engine.check_integrity()


def test_kv_that_is_lost_behind_forgotten_inputs_is_rebuilt_and_said_to_be_once() -> None:
    driver = new_driver(num_pages=10, history_bytes=0)
    history = long_session(driver)
    lose_kv(driver)
    first_kept = find(driver).context.first_kept
    assert first_kept == 4 + WINDOW.droppable(len(history))
    before = driver.runner.num_tokens
    go_on(driver, history, rebuilt=True)
    assert driver.runner.num_tokens - before == 4 + len(history) - 1 - first_kept, "sinks, window and the turn"
    go_on(driver, history, rebuilt=False)


def test_few_inputs_are_kept_and_nothing_is_rebuilt() -> None:
    driver = new_driver(num_pages=10)
    history = long_session(driver)
    lose_kv(driver)
    assert find(driver).context.token_ids == history
    before = driver.runner.num_tokens
    go_on(driver, history, rebuilt=False)
    assert driver.runner.num_tokens - before == len(history) - 1, "all of it was computed again"


def test_a_session_that_wants_its_whole_history_keeps_it() -> None:
    driver = new_driver(num_pages=10, history_bytes=0)
    history = long_session(driver, history="whole")
    lose_kv(driver)
    assert find(driver).context.token_ids == history
    go_on(driver, history, rebuilt=False)


def test_as_many_bytes_are_kept_as_the_setting_says() -> None:
    """Of ids 4 bytes each; with one more than that all of them go, since without it the others are of no use."""
    driver = new_driver(history_bytes=4 * 24)
    nums_forgotten = []
    driver.turn(1, [1], **OPTIONS)
    for _ in range(60):
        driver.turn(1, [2], max_tokens=0)
        context = find(driver).context
        nums_forgotten.append((find(driver).num_dropped, context.num_forgotten))
    assert all(num_forgotten == 0 for num_dropped, num_forgotten in nums_forgotten if num_dropped <= 24)
    gone = [(num_dropped, num_forgotten) for num_dropped, num_forgotten in nums_forgotten if num_dropped > 24]
    assert gone
    assert all(num_dropped == num_forgotten for num_dropped, num_forgotten in gone)


@pytest.mark.parametrize("num_steps", range(6))
def test_a_turn_that_is_undone_while_it_rebuilds_leaves_that_to_be_said_by_the_next(num_steps: int) -> None:
    driver = new_driver(num_pages=10, history_bytes=0, max_batch_tokens=4)
    history = long_session(driver)
    lose_kv(driver)
    _, turn = driver.post(1, [9, 9, 9], max_tokens=4)
    driver.steps(num_steps)
    driver.engine.cancel(turn)
    driver.run()
    assert len(find(driver).context) == len(history)
    go_on(driver, history, rebuilt=True)
    go_on(driver, history, rebuilt=False)


def test_a_pass_that_fails_while_it_rebuilds_changes_nothing() -> None:
    driver = new_driver(num_pages=10, history_bytes=0, max_batch_tokens=4)
    history = long_session(driver)
    lose_kv(driver)
    failing, _ = driver.post(1, [9], max_tokens=4)
    driver.steps(3)
    driver.runner.error = RuntimeError("the pass breaks")
    driver.run()
    assert failing.code == "INTERNAL"
    go_on(driver, history, rebuilt=True)


def test_a_turn_that_loses_its_pages_says_so_itself() -> None:
    """Three sessions that keep five pages each, on a pool for one and a half."""
    driver = new_driver(num_pages=10, history_bytes=0)
    histories = {n: [n] for n in range(3)}
    nums_rebuilt = dict.fromkeys(histories, 0)
    for n in histories:
        driver.turn(n, [n], max_tokens=0, **OPTIONS)
    for turn in range(30):
        answers = {n: driver.post(n, [turn, n], max_tokens=3)[0] for n in histories}
        driver.run()
        for n, answer in answers.items():
            histories[n] += [turn, n]
            assert answer.token_ids == expected_tokens(histories[n], 3, window=WINDOW)
            nums_rebuilt[n] += answer.status.rebuilt
            histories[n] += answer.token_ids
    assert sum(nums_rebuilt.values()) == driver.engine.recorder.metrics.kv_rebuilds.total() > 0


@pytest.mark.parametrize("num_back", [0, 3, 4])
def test_a_rewind_of_what_was_rebuilt_is_exact(num_back: int) -> None:
    driver = new_driver(num_pages=10, history_bytes=0)
    history = long_session(driver)
    lose_kv(driver)
    go_on(driver, history, rebuilt=True)
    left = max(len(history) - num_back, find(driver).least_rewind)
    before = driver.runner.num_tokens
    del history[left:]
    go_on(driver, history, rebuilt=False, rewind_to=left)
    assert driver.runner.num_tokens - before <= 2 + 3
    refused = driver.turn(1, [9], rewind_to=find(driver).least_rewind - 1)
    assert refused.code == "FAILED_PRECONDITION"


def test_an_interrupt_and_a_rewind_find_what_they_need_where_inputs_are_forgotten() -> None:
    driver = new_driver(history_bytes=0)
    history = long_session(driver)
    for _ in range(20):
        answer, _ = driver.post(1, [3], max_tokens=9)
        driver.post(1, [4], max_tokens=1)
        driver.steps(4)
        heard = [*history, 3, *answer.token_ids][: len(history) + 2]
        history = heard
        go_on(driver, history, rebuilt=False, on_overlap="interrupt", rewind_to=len(heard))
        assert answer.status.finish_reason == "interrupted"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_branch_goes_on_where_inputs_are_forgotten(is_lost: bool) -> None:
    driver = new_driver(num_pages=10, history_bytes=0)
    history = long_session(driver)
    if is_lost:
        lose_kv(driver)
    branch = list(history)
    go_on(driver, branch, rebuilt=is_lost, session_id=2, start=True, fork_of="1")
    assert find(driver, 2).context.num_forgotten
    go_on(driver, history, rebuilt=is_lost)
    go_on(driver, branch, rebuilt=False, session_id=2)


def test_penalties_count_what_is_forgotten() -> None:
    """They count the tokens of the context, whether these are still there or not."""
    answers = []
    for history in ("bounded", "whole"):
        driver = new_driver(history_bytes=0)
        long_session(driver, history=history)
        answer = driver.turn(1, [3], max_tokens=8, presence_penalty=2.0, frequency_penalty=0.5)
        answers.append(answer.token_ids)
        assert bool(find(driver).context.num_forgotten) is (history == "bounded")
    assert answers[0] == answers[1]


def test_how_much_history_is_kept_is_said_with_a_window_only() -> None:
    driver = new_driver()
    refused = driver.turn(1, [1], start=True, history="whole")
    assert refused.code == "INVALID_ARGUMENT"
    assert "come with overflow=window" in str(refused.error)
    driver.turn(1, [1], **OPTIONS)
    assert driver.turn(2, [1], start=True, fork_of="1", history="whole").code == "INVALID_ARGUMENT"


# ---- another server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_kv", [False, True])
def test_another_server_goes_on_from_what_was_kept(tmp_path: Path, has_kv: bool) -> None:
    settings: dict[str, Any] = {"num_pages": 10, "history_bytes": 0}
    driver = new_driver(**settings)
    history = long_session(driver)
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    snapshot = saved(driver, expires_s=directory.expires_s)
    assert snapshot.format_version == 2, "older servers would take it for whole"
    directory.save(snapshot)
    if has_kv:
        assert directory.add_kv(snapshot, copied_kv(driver))
    other = new_driver(snapshots=directory, **settings)
    other.turn(1, **RESUME)
    context = find(other).context
    assert (len(context), context.num_forgotten) == (len(history), find(driver).context.num_forgotten)
    assert sorted(context.known_ids()) == sorted(history)
    go_on(other, history, rebuilt=not has_kv)
    go_on(other, history, rebuilt=False)
    other.engine.stop()


def test_a_session_that_has_not_said_that_it_was_rebuilt_says_so_elsewhere(tmp_path: Path) -> None:
    driver = new_driver(num_pages=10, history_bytes=0, max_batch_tokens=4)
    history = long_session(driver)
    lose_kv(driver)
    _, turn = driver.post(1, [9], max_tokens=4)
    driver.steps(6)
    driver.engine.cancel(turn)
    driver.run()
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    snapshot = saved(driver, expires_s=directory.expires_s)
    directory.save(snapshot)
    assert directory.add_kv(snapshot, copied_kv(driver))
    other = new_driver(num_pages=10, snapshots=directory, history_bytes=0)
    assert other.turn(1, **RESUME).status.rebuilt
    go_on(other, history, rebuilt=False)
    other.engine.stop()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_that_comes_back_from_another_tier_is_not_rebuilt(tmp_path: Path, tier: str) -> None:
    tiers: dict[str, Any] = {"host": {"host_tier_bytes": 1 << 20}, "disk": {"disk_tier_dir": str(tmp_path)}}
    driver = new_driver(num_pages=10, history_bytes=0, **tiers[tier])
    history = long_session(driver)
    driver.turn(99, [5] * 39, start=True, end=True, max_tokens=1)
    settle(driver)
    assert find(driver).kv_place in ("host", "disk")
    go_on(driver, history, rebuilt=False)
    driver.engine.stop()


# ---- layers with a window of their own -----------------------------------------------------------------------------


@pytest.mark.parametrize("layer_window", [2, 4, 9])
def test_layers_that_look_back_less_far_are_rebuilt_too(layer_window: int) -> None:
    driver = new_driver(num_pages=10, history_bytes=0, window=layer_window)
    history = long_session(driver)
    session = find(driver)
    driver.engine._tiers.offload(session)
    assert session.kv_place == "tokens"
    go_on(driver, history, rebuilt=True)
    for _ in range(8):
        go_on(driver, history, rebuilt=False)
