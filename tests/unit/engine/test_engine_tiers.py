"""Tests of engine: sessions whose KV is in host memory or on disk. Their clients notice nothing but time."""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from microturn.kv.copier import CopyShare
from microturn.kv.window import Window
from microturn.offload import disk_store
from support.fake_runner import FakeDriver, expected_tokens
from support.late_copies import LateCopier
from support.threads import starting_engines
from support.tiers import counters_of, settle

# A tier, by what it is set with.
HOST, DISK = "host", "disk"


@pytest.fixture(params=product([HOST, DISK], [None, LateCopier]), ids=lambda of: f"{of[0]}-{of[1] and 'late'}")
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeDriver]:
    """An engine over a pool for one context, with one tier or the other, and copies in time or late."""
    of, new_copier = request.param
    tier = {"host_tier_bytes": 1_000_000} if of == HOST else {"disk_tier_dir": str(tmp_path)}
    driver = FakeDriver(num_pages=8, max_context=32, window_slack=4, new_copier=new_copier, **tier)
    yield driver
    driver.engine.stop()
    assert list(tmp_path.iterdir()) == []


def told(driver: FakeDriver, session_id: object = 1, num_tokens: int = 18) -> list[int]:
    """What a session holds after a first turn."""
    given = [*range(num_tokens)]
    return given + driver.turn(session_id, given, start=True, max_tokens=2).token_ids


def move_away(driver: FakeDriver, session_id: object = 1) -> None:
    """Others take the session's pages, and its KV is as far away as it goes."""
    driver.turn("other", [9] * 28, start=True, end=True, max_tokens=4)
    settle(driver)
    session = driver.engine._sessions.find(session_id)
    assert session.stored is not None
    assert not session.table.pages
    assert (session.stored.image.pages is None) == (driver.engine._tiers.storage.disk is not None)


def num_kept_bytes(driver: FakeDriver) -> int:
    """Bytes in host memory and in files."""
    settle(driver)
    storage = driver.engine._tiers.storage
    return storage.host.used_bytes + (0 if storage.disk is None else storage.disk.used_bytes)


def test_a_session_that_was_away_goes_on_and_computes_nothing_again(driver: FakeDriver) -> None:
    history = told(driver)
    move_away(driver)
    driver.runner.batches.clear()
    answer = driver.turn(1, [5], max_tokens=3)
    assert answer.token_ids == expected_tokens([*history, 5], 3)
    assert answer.status.usage == {
        "input_tokens": 1,
        "output_tokens": 3,
        "computed_tokens": 4,
        "cached_tokens": len(history) - 1,
    }
    assert driver.runner.num_tokens == 4
    assert num_kept_bytes(driver) == 0


@pytest.mark.parametrize("num_back", [0, 3, 4])
def test_a_session_whose_window_slid_goes_on_and_computes_nothing_again(driver: FakeDriver, num_back: int) -> None:
    window = Window(num_sinks=4, length=6, slack=4)
    history: list[int] = []
    for turn in range(12):
        options = {"start": True, "overflow": "window", "sink_tokens": 4, "window_tokens": 6} if turn == 0 else {}
        answer = driver.turn(1, [turn, 7], max_tokens=2, **options)
        history += [turn, 7, *answer.token_ids]
    move_away(driver)
    before = driver.runner.num_tokens
    del history[len(history) - num_back :]
    answer = driver.turn(1, [5], max_tokens=3, rewind_to=len(history))
    assert answer.token_ids == expected_tokens([*history, 5], 3, window=window)
    assert driver.runner.num_tokens - before == 4
    branch = driver.turn(2, [6], start=True, fork_of="1", max_tokens=2)
    assert branch.token_ids == expected_tokens([*history, 5, *answer.token_ids, 6], 2, window=window)


def test_its_status_says_how_long_that_took(tmp_path: Path) -> None:
    driver = FakeDriver(num_pages=8, max_context=32, disk_tier_dir=str(tmp_path))
    told(driver)
    move_away(driver)
    answer, _ = driver.post(1, [5], max_tokens=3)
    driver.clock.now_s += 0.1
    driver.engine.step()
    driver.clock.now_s += 0.25
    settle(driver)
    run = driver.runner.run

    def run_for_a_while(batch: Any) -> Any:
        driver.clock.now_s += 0.5
        return run(batch)

    driver.runner.run = run_for_a_while
    driver.run()
    assert answer.status.timing_ms == pytest.approx(
        {"queue": 100, "restore": 250, "prefill": 500, "decode": 1000, "total": 1850}
    )
    driver.engine.stop()


def test_keeping_it_alive_leaves_it_where_it_is(driver: FakeDriver) -> None:
    history = told(driver)
    move_away(driver)
    kept = num_kept_bytes(driver)
    assert driver.turn(1).status.context_len == len(history)
    assert num_kept_bytes(driver) == kept > 0


@pytest.mark.parametrize("position", [0, 1, 4, 7, 8, 19, 20])
def test_a_rewind_cuts_what_is_away(driver: FakeDriver, position: int) -> None:
    history = told(driver)
    move_away(driver)
    answer = driver.turn(1, [5, 6], rewind_to=position, max_tokens=3)
    assert answer.token_ids == expected_tokens([*history[:position], 5, 6], 3)
    assert answer.status.usage["cached_tokens"] == max(0, position - 1)


def test_a_rewind_that_appends_nothing_counts_at_the_next_turn(driver: FakeDriver) -> None:
    history = told(driver)
    move_away(driver)
    assert driver.turn(1, rewind_to=6).status.context_len == 6
    assert driver.turn(1, [5], max_tokens=3).token_ids == expected_tokens([*history[:6], 5], 3)


def test_a_turn_that_is_given_up_on_the_way_leaves_the_session_as_it_was(driver: FakeDriver) -> None:
    history = told(driver)
    move_away(driver)
    answer, turn = driver.post(1, [5] * 6, rewind_to=9, max_tokens=3)
    driver.engine._take_posts(block=False)
    driver.engine._tiers.is_ready(driver.engine._sessions.find(1))
    driver.engine.cancel(turn)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    settle(driver)
    assert driver.turn(1, [6], max_tokens=3).token_ids == expected_tokens([*history, 6], 3)


def test_a_turn_that_is_interrupted_on_the_way_has_appended_its_input(driver: FakeDriver) -> None:
    history = told(driver)
    move_away(driver)
    first, _ = driver.post(1, [5, 5], max_tokens=9)
    driver.engine._take_posts(block=False)
    driver.engine._tiers.is_ready(driver.engine._sessions.find(1))
    second, _ = driver.post(1, [6], on_overlap="interrupt", max_tokens=3)
    driver.run()
    assert first.status.finish_reason == "interrupted"
    assert second.token_ids == expected_tokens([*history, 5, 5, 6], 3)


def test_a_turn_whose_time_passes_on_the_way_ends_with_its_input(tmp_path: Path) -> None:
    driver = FakeDriver(num_pages=8, max_context=32, disk_tier_dir=str(tmp_path))
    history = told(driver)
    move_away(driver)
    answer, _ = driver.post(1, [5, 5], max_tokens=9, deadline_ms=50)
    driver.engine.step()
    driver.clock.now_s += 0.06
    driver.engine.step()
    assert answer.status.finish_reason == "deadline"
    assert answer.token_ids == []
    settle(driver)
    assert driver.turn(1, [6], max_tokens=3).token_ids == expected_tokens([*history, 5, 5, 6], 3)
    driver.engine.stop()


def test_a_session_that_ends_away_leaves_nothing(driver: FakeDriver) -> None:
    told(driver)
    move_away(driver)
    assert driver.turn(1, end=True).status.finish_reason == "closed"
    assert num_kept_bytes(driver) == 0


def test_a_session_that_expires_away_leaves_nothing(driver: FakeDriver) -> None:
    told(driver)
    move_away(driver)
    driver.clock.now_s += 61
    driver.engine.step()
    assert driver.turn(1, [5]).code == "EXPIRED"
    assert num_kept_bytes(driver) == 0


def test_a_start_on_its_id_begins_anew(driver: FakeDriver) -> None:
    told(driver)
    move_away(driver)
    assert driver.turn(1, [5], start=True, max_tokens=3).token_ids == expected_tokens([5], 3)
    assert num_kept_bytes(driver) == 0


@pytest.mark.parametrize("ends_first", ["parent", "branch"])
def test_a_branch_of_it_has_its_kv_too(driver: FakeDriver, ends_first: str) -> None:
    history = told(driver)
    move_away(driver)
    driver.runner.batches.clear()
    answer = driver.turn("branch", [7], start=True, fork_of="1", rewind_to=14, max_tokens=2)
    assert answer.token_ids == expected_tokens([*history[:14], 7], 2)
    assert answer.status.usage["cached_tokens"] == 13
    branch = [*history[:14], 7, *answer.token_ids]
    if ends_first == "parent":
        driver.turn(1, end=True)
    answer = driver.turn("branch", [8], max_tokens=2)
    assert answer.token_ids == expected_tokens([*branch, 8], 2)
    driver.turn("branch", end=True)
    if ends_first == "branch":
        assert driver.turn(1, [8], max_tokens=2).token_ids == expected_tokens([*history, 8], 2)
        driver.turn(1, end=True)
    assert num_kept_bytes(driver) == 0
    assert driver.pool.num_free == 8


def test_a_branch_that_is_refused_keeps_nothing(driver: FakeDriver) -> None:
    """Its deadline had passed when it was to be opened: what it shared with its parent was never given back."""
    history = told(driver)
    for move in (lambda: None, lambda: move_away(driver)):
        move()
        answer, _ = driver.post("branch", [7], start=True, fork_of="1", deadline_ms=10)
        driver.clock.now_s += 1
        driver.run()
        assert answer.code == "DEADLINE_EXCEEDED"
    assert driver.turn(1, [8], max_tokens=2).token_ids == expected_tokens([*history, 8], 2)
    driver.turn(1, end=True)
    assert num_kept_bytes(driver) == 0


def test_two_sessions_that_each_want_the_whole_pool_go_on_without_computing_twice() -> None:
    """The one that must give way goes to host memory, and comes back."""
    driver = FakeDriver(num_pages=8, max_context=32, host_tier_bytes=1_000_000)
    answers = [driver.post(number, [number] * 8, start=True, max_tokens=24)[0] for number in (1, 2)]
    driver.run()
    for number, answer in enumerate(answers, start=1):
        assert answer.token_ids == expected_tokens([number] * 8, 24)
        assert answer.status.usage["computed_tokens"] == 31
    assert counters_of(driver).restored > 0


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("seed", range(8))
def test_pages_change_hands_while_copies_are_under_way_and_no_token_is_wrong(
    tmp_path: Path, seed: int, is_asynchronous: bool
) -> None:
    """Ten sessions in a pool for two: they come back, are cut, given up, begun anew and pushed out on the way."""
    rng = random.Random(seed)
    tier = {"disk_tier_dir": str(tmp_path), "disk_tier_bytes": 20_000} if seed % 2 else {"host_tier_bytes": 8_000}
    kinds = {"new_copier": partial(LateCopier, seed=seed), "is_asynchronous": is_asynchronous}
    driver = FakeDriver(num_pages=14, max_context=40, **kinds, **tier)
    histories: dict[int, list[int]] = {}
    for _ in range(80):
        asked = []
        for session_id in rng.sample(range(10), 3):
            history = histories.get(session_id, [])
            given = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
            is_new = session_id not in histories or len(history) > 28 or rng.random() < 0.05
            kept = 0 if is_new else rng.choice([len(history)] * 3 + [rng.randrange(len(history) + 1)])
            options = {"start": True} if is_new else {"rewind_to": kept}
            answer, turn = driver.post(session_id, given, max_tokens=2, **options)
            asked.append((session_id, [] if is_new else history, [*history[:kept], *given], answer, turn))
            driver.steps(rng.randrange(3))
        for *_, turn in asked:
            if rng.random() < 0.2:
                driver.engine.cancel(turn)
        driver.steps(rng.randrange(3))
        coming = [session for session in driver.engine._sessions if session.stored and session.table.pages]
        if coming and driver.engine._in_flight is None and rng.random() < 0.5:
            driver.engine._tiers.offload(rng.choice(coming))
        driver.run()
        for session_id, before, told, answer, _ in asked:
            histories[session_id] = before
            if answer.status.finish_reason != "cancelled":
                assert answer.token_ids == expected_tokens(told, 2)
                histories[session_id] = [*told, *answer.token_ids]
    assert counters_of(driver).restored > 40
    driver.engine.stop()


# ---- what goes wrong with files ------------------------------------------------------------------------------------


def damaged(file: Path, damage: str) -> None:
    content = file.read_bytes()
    match damage:
        case "flipped bit":
            file.write_bytes(content[:-20] + bytes([content[-20] ^ 16]) + content[-19:])
        case "truncated":
            file.write_bytes(content[: len(content) // 2])
        case "missing":
            file.unlink()
        case "another model":
            file.write_bytes(content.replace(b'"model":"', b'"model":"another '))


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing", "another model"])
def test_a_file_that_is_not_what_was_written_is_never_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(num_pages=8, max_context=32, disk_tier_dir=str(tmp_path))
    history = told(driver)
    move_away(driver)
    (file,) = tmp_path.glob("*/*.safetensors")
    damaged(file, damage)
    answer = driver.turn(1, [5], max_tokens=3)
    assert answer.token_ids == expected_tokens([*history, 5], 3)
    assert answer.status.usage["cached_tokens"] == 0
    assert answer.status.usage["computed_tokens"] == len(history) + 3
    assert counters_of(driver).unreadable_files == 1
    assert "KV is recomputed: its file cannot be used" in caplog.text
    driver.engine.stop()


def test_a_full_disk_costs_time_and_no_token(tmp_path: Path) -> None:
    """Files above 650 bytes cannot be written; from then on the disk tier holds no more than it has."""
    driver = FakeDriver(num_pages=16, max_context=48, disk_tier_dir=str(tmp_path), host_tier_bytes=3000)
    rng = random.Random(3)
    histories: dict[int, list[int]] = {session_id: [] for session_id in range(12)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (650, before[1]))
    try:
        for number in range(4):
            for session_id in rng.sample(range(12), 12):
                given = [rng.randrange(97) for _ in range(rng.randint(4, 9))]
                answer = driver.turn(session_id, given, start=number == 0, max_tokens=2)
                histories[session_id] += given
                assert answer.token_ids == expected_tokens(histories[session_id], 2)
                histories[session_id] += answer.token_ids
                settle(driver)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert counters_of(driver).failed_writes > 0
    assert counters_of(driver).dropped > 0
    assert counters_of(driver).restored > 0
    driver.engine.stop()
    assert list(tmp_path.iterdir()) == []


# ---- threads -------------------------------------------------------------------------------------------------------


def cpu_s(during_s: float) -> float:
    """Seconds of a core that this process used for so long."""
    before = time.process_time()
    time.sleep(during_s)
    return time.process_time() - before


def test_a_thousand_parked_sessions_cost_nothing(tmp_path: Path) -> None:
    """In the pool, in host memory and on disk: less than 2 % of a core."""
    with starting_engines() as start:
        driver = start(
            num_pages=200, max_context=64, max_sessions=1000, host_tier_bytes=40_000, disk_tier_dir=str(tmp_path)
        )
        for session_id in range(1000):
            driver.ask(session_id, [session_id % 97] * 5, start=True, max_tokens=1).wait()
        time.sleep(1)  # the last of them are still being written
        tiers = [session.stored for session in list(driver.engine._sessions)]
        places = {None if stored is None else stored.image.place.name for stored in tiers}
        assert places >= {None, "HOST", "DISK"}
        assert cpu_s(2.0) < 0.02 * 2.0


def test_the_engine_rests_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did nothing but ask, thousands of times a second, whether the file was there."""
    with starting_engines() as start:
        driver = start(num_pages=8, max_context=32, disk_tier_dir=str(tmp_path))
        first = driver.ask(1, [*range(18)], start=True, max_tokens=2).wait()
        driver.ask(2, [7] * 28, start=True, max_tokens=4).wait()
        storage = driver.engine._tiers.storage
        assert storage.disk is not None
        give_up_s = time.monotonic() + 10
        while not counters_of(driver).moved_to_disk:  # until it has been written, it comes back from memory
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        hold, read = threading.Event(), disk_store.read_image

        def read_slowly(*args: Any) -> None:
            assert hold.wait(10)
            read(*args)

        monkeypatch.setattr(disk_store, "read_image", read_slowly)
        late = driver.ask(1, [5], max_tokens=3, deadline_ms=300)
        answer = driver.ask(1, [6], max_tokens=3)
        used_s = cpu_s(1.0)
        hold.set()
        assert late.wait().status.finish_reason == "deadline", "nobody looked at the time"
        assert late.status.timing_ms["total"] < 900
        history = [*range(18), *first.token_ids, 5, 6]
        assert answer.wait().token_ids == expected_tokens(history, 3)
        assert used_s < 0.1


def test_sessions_that_keep_a_beat_are_back_before_their_turns(tmp_path: Path) -> None:
    with starting_engines() as start:
        driver = start(num_pages=32, max_context=32, disk_tier_dir=str(tmp_path))
        histories: dict[int, list[int]] = {}
        begin_s = time.monotonic()
        for number in range(7):
            for session_id in range(5):
                due_s = begin_s + 0.5 * number + 0.1 * session_id
                time.sleep(max(0.0, due_s - time.monotonic()))
                answer = driver.ask(session_id, [number] * 2, start=number == 0, max_tokens=1).wait()
                history = histories.setdefault(session_id, [])
                history += [number] * 2
                assert answer.token_ids == expected_tokens(history, 1)
                history += answer.token_ids
                if number == 3 and session_id == 4:
                    driver.ask("big", [3] * 28, start=True, max_tokens=4).wait()
                    driver.ask("bigger", [4] * 28, start=True, max_tokens=4).wait()
        assert counters_of(driver).moved_to_host > 0
        assert counters_of(driver).restored_ahead > 0


@pytest.mark.parametrize("kind", ["session", "layers"])
def test_a_paused_turn_that_ends_while_its_session_is_copied_out(kind: str) -> None:
    """The session then gives up pages that it needs no more, and what was copied of them is worthless."""
    settings: dict[str, Any] = {"window": 8} if kind == "layers" else {}
    values = {} if kind == "layers" else {"overflow": "window", "sink_tokens": 4, "window_tokens": 12}
    window = None if kind == "layers" else Window(num_sinks=4, length=12, slack=4)
    driver = FakeDriver(num_pages=64, max_context=128, window_slack=4, host_tier_bytes=1_000_000, **settings)
    driver.runner.kv._copier.share = CopyShare(for_turns=64, for_later=1)
    history = [*range(30)]
    history += driver.turn(1, history, start=True, turn=0, max_tokens=2, idle_timeout_s=600, **values).token_ids
    recorder, turn = driver.post(1, [7] * 12, turn=1, max_tokens=60, deadline_ms=5000)
    driver.steps(14)
    driver.engine.cancel(turn)
    driver.run()
    history += [7] * 12 + recorder.token_ids
    tiers = driver.engine._tiers
    session = driver.engine._sessions.find(1)
    assert session is not None
    for number in range(2, 40):  # others take nearly all pages
        driver.post(number, [number] * 10, start=True, max_tokens=20)
        for _ in range(30):
            driver.steps(1)
            if tiers._saving is not None and tiers._saving.session is session and tiers._saving.num_copied:
                break
        else:
            continue
        break
    driver.clock.now_s += 6
    driver.engine._take_posts(block=False)
    driver.engine._lifecycle.expire_turns()
    assert session.running is None
    for number in range(100, 140):
        driver.post(number, [number % 90] * 10, start=True, max_tokens=20)
        driver.run()
        if session.stored is not None:
            break
    assert session.stored is not None
    history = history[: len(session.context)]
    answer, _ = driver.post(1, [3], max_tokens=4)
    driver.run()
    assert answer.token_ids == expected_tokens([*history, 3], 4, window=window)
