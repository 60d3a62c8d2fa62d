"""Tests of snapshots.arrivals: clients that come back to what was saved, through a whole engine."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver, expected_tokens
from support.snapshots import FAR_S, KEY, copied_kv, find, live, saved
from support.tiers import settle

DENIED = "PERMISSION_DENIED: the session belongs to somebody else: bring the session_key that its START set"
RESUME = {"start": True, "resume": True}


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path, ttl_s=60)


@pytest.fixture
def before() -> FakeDriver:
    """The server that saves."""
    return FakeDriver(max_context=256)


@pytest.fixture
def after(directory: SnapshotDirectory) -> FakeDriver:
    """The server that is started next."""
    return restarted(directory)


_started: list[FakeDriver] = []


@pytest.fixture(autouse=True)
def _all_are_stopped() -> Iterator[None]:
    yield
    while _started:
        _started.pop().engine.stop()


def restarted(directory: SnapshotDirectory, **values: Any) -> FakeDriver:
    _started.append(FakeDriver(**{"max_context": 256, **values}, snapshots=directory))
    return _started[-1]


def save(before: FakeDriver, directory: SnapshotDirectory, session_id: int = 1, **values: Any) -> None:
    directory.save(saved(before, session_id, **values))


def save_with_kv(before: FakeDriver, directory: SnapshotDirectory) -> None:
    snapshot = saved(before)
    directory.save(snapshot)
    assert directory.add_kv(snapshot, copied_kv(before))


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def files(tmp_path: Path, suffix: str) -> list[Path]:
    return list(tmp_path.glob(f"*{suffix}"))


# ---- a client comes back -------------------------------------------------------------------------------------------


def test_a_session_goes_on_as_if_nothing_had_been(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save(before, directory)
    again = after.turn(1, [9], max_tokens=6, turn=3, **RESUME)
    expected = before.turn(1, [9], max_tokens=6, turn=3)
    assert again.token_ids == expected.token_ids
    assert (again.status.context_len, again.status.turn) == (expected.status.context_len, 3)
    assert again.status.seed == expected.status.seed == 11
    assert after.turn(1, [10], max_tokens=4).token_ids == before.turn(1, [10], max_tokens=4).token_ids


def test_a_turn_that_was_answered_before_is_not_done_again(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    """B12: the answer was on its way when the server stopped, and the client asks again."""
    answers = live(before)
    save(before, directory)
    again = after.turn(1, [8], turn=2, max_tokens=2, return_appended_ids=True, **RESUME)
    assert again.status.replayed
    assert again.token_ids == answers[2].token_ids
    assert after.turn(1, [8], turn=2, max_tokens=3).code == "INVALID_ARGUMENT"
    assert after.turn(1, [8], turn=5).code == "FAILED_PRECONDITION"
    assert after.runner.batches == []


def test_a_first_turn_that_was_answered_before_is_answered_from_its_record(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    first, *_ = live(before)
    save(before, directory)
    given = {"turn": 0, "max_tokens": 3, "logprobs": True}
    options = {"session_priority": 2, "idle_timeout_s": 30, "max_context": 200, "cache_salt": "salt"}
    options |= {"temperature": 0.7, "top_k": 40, "stop_token_ids": "[96]", "seed": 11}
    again = after.turn(1, [5, 6, 7], start=True, **given, **options)
    assert again.status.replayed
    assert again.token_ids == first.token_ids
    assert len(find(after).context) == 14


def test_a_rewind_reaches_back_beyond_the_restart(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save(before, directory)
    again = after.turn(1, [9], rewind_to=4, max_tokens=5, temperature=0, **RESUME)
    kept = find(before).context.token_ids[:4]
    assert again.token_ids == expected_tokens([*kept, 9], 5)


def test_a_running_session_is_saved_as_of_its_last_committed_point(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    before.turn(1, [5, 6], start=True, max_tokens=3, turn=0)
    history = list(find(before).context.token_ids)
    before.post(1, [7], max_tokens=50, turn=1)
    before.post(1, [8], max_tokens=1, turn=2)
    before.steps(5)
    assert len(find(before).context) > len(history) + 1
    save(before, directory)
    again = after.turn(1, [7], max_tokens=4, turn=1, **RESUME)
    assert again.token_ids == expected_tokens([*history, 7], 4)


def test_a_session_that_lives_is_not_taken_up_beside_itself(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    after = restarted(directory)
    after.turn(1, [3], max_tokens=0, **RESUME)
    save(before, directory, epoch=2)
    assert after.turn(1, [4], max_tokens=0, **RESUME).status.context_len == 16
    assert len(files(tmp_path, ".snapshot")) == 1


# ---- START without resume ------------------------------------------------------------------------------------------


def test_start_begins_a_saved_session_anew(before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory) -> None:
    live(before)
    save(before, directory)
    assert after.turn(1, [8], start=True, max_tokens=2).token_ids == expected_tokens([8], 2)
    after.turn(1, end=True)
    assert after.turn(1, **RESUME).code == "NOT_FOUND"


@pytest.mark.parametrize("trouble", ["another model", "damaged", "too long"])
def test_start_begins_anew_beside_what_cannot_be_taken_up(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    live(before)
    save(before, directory)
    if trouble == "damaged":
        (file,) = files(tmp_path, ".snapshot")
        file.write_bytes(file.read_bytes()[:100])
    after = FakeDriver(
        max_context=13 if trouble == "too long" else 256,
        model_fingerprint="another" if trouble == "another model" else "the test's",
        snapshots=directory,
    )
    with caplog.at_level(logging.WARNING):
        assert after.turn(1, [8], start=True, max_tokens=2).token_ids == expected_tokens([8], 2)
    assert "begins anew, beside what is saved of it" in caplog.text


# ---- who may not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [RESUME, {"start": True}])
@pytest.mark.parametrize("given", [{}, {"session_key": "theirs"}])
def test_without_the_key_nothing_is_taken_up_and_nothing_said(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, start: dict[str, Any], given: dict[str, str]
) -> None:
    live(before, **KEY)
    save(before, directory)
    assert str(after.turn(1, [9], **start, **given).error) == DENIED
    assert after.turn(1, [9], **RESUME, **KEY).status.context_len > 14


def test_with_the_key_the_session_goes_on_and_keeps_it(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before, **KEY)
    save(before, directory)
    assert after.turn(1, [9], max_tokens=0, **RESUME, **KEY).status.context_len == 15
    assert str(after.turn(1, [9]).error) == DENIED
    assert after.turn(1, end=True, **KEY).status.finish_reason == "closed"


def test_where_there_is_no_room_the_session_stays_saved(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    after = restarted(directory, max_sessions=1)
    after.turn(2, [5], start=True)
    assert after.turn(1, **RESUME).code == "RESOURCE_EXHAUSTED"
    assert len(files(tmp_path, ".snapshot")) == 1
    after.turn(2, end=True)
    assert after.turn(1, **RESUME).status.context_len == 14


# ---- what is out of date, expired, damaged or another model's ------------------------------------------------------


def test_an_older_copy_is_refused_once_a_newer_one_was_taken_up(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save(before, directory, epoch=1)
    (file,) = files(tmp_path, ".snapshot")
    shutil.copy(file, tmp_path / "backup")
    save(before, directory, epoch=2)
    after.turn(1, **RESUME)
    after.turn(1, end=True)
    shutil.copy(tmp_path / "backup", file)
    for server in (after, restarted(directory)):
        answer = server.turn(1, **RESUME)
        assert answer.code == "FAILED_PRECONDITION"
        assert "out of date" in str(answer.error)


def test_a_session_of_a_recycled_id_is_newer_than_any_copy_of_the_earlier_one(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    before.turn(1, [1, 2, 3], start=True, max_tokens=0)
    save(before, directory, epoch=find(before).epoch + 1)
    after.turn(1, **RESUME)
    after.turn(1, [7, 8], start=True, max_tokens=0)
    assert find(after).epoch > find(before).epoch
    directory.save(saved(after, epoch=find(after).epoch + 1))
    assert restarted(directory).turn(1, max_tokens=0, **RESUME).status.context_len == 2


def test_what_was_saved_too_long_ago_has_expired_for_its_owner(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before, **KEY)
    save(before, directory, expires_s=1e9)
    assert after.turn(1, **RESUME, **KEY).code == "EXPIRED"
    assert files(tmp_path, ".snapshot") == []
    assert after.turn(1, **RESUME, **KEY).code == "NOT_FOUND"


def test_what_was_saved_too_long_ago_was_never_here_for_others(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before, **KEY)
    save(before, directory, expires_s=1e9)
    assert str(after.turn(1, **RESUME).error) == "NOT_FOUND: no session '1' is here: open one with START"


def test_a_session_of_another_model_is_refused_and_left_to_a_server_of_that_model(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    other = restarted(directory, model_fingerprint="another")
    answer = other.turn(1, [9], max_tokens=3, **RESUME)
    assert answer.code == "FAILED_PRECONDITION"
    assert "saved with another model" in str(answer.error)
    assert other.runner.batches == []
    assert len(files(tmp_path, ".snapshot")) == 1


@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.99])
def test_a_flipped_bit_is_an_error_and_logged(
    before: FakeDriver,
    after: FakeDriver,
    directory: SnapshotDirectory,
    tmp_path: Path,
    place: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live(before)
    save(before, directory)
    (file,) = files(tmp_path, ".snapshot")
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)
    answer = after.turn(1, [9], max_tokens=3, **RESUME)
    assert answer.code == "INTERNAL"
    assert "its file is damaged: open a new one" in str(answer.error)
    assert "cannot be taken up" in caplog.text
    assert after.runner.batches == []
    assert after.turn(1, [9], **RESUME).code == "NOT_FOUND"


def test_a_session_far_from_its_end_is_not_expired(directory: SnapshotDirectory, before: FakeDriver) -> None:
    live(before)
    assert not directory.is_expired(saved(before, expires_s=FAR_S))


# ---- KV ------------------------------------------------------------------------------------------------------------


def go_on(driver: FakeDriver, **values: Any) -> tuple[list[int], int]:
    """What a turn says, and how many tokens were computed for it."""
    answer = driver.turn(1, [9], max_tokens=3, temperature=0, **values)
    return answer.token_ids, answer.status.usage["computed_tokens"]


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_with_its_kv_nothing_is_computed_again(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path, tier: str
) -> None:
    live(before)
    save_with_kv(before, directory)
    tiers: dict[str, Any] = {"host": {"host_tier_bytes": 1 << 20}, "disk": {"disk_tier_dir": str(tmp_path / "tier")}}
    (tmp_path / "tier").mkdir()
    after = restarted(directory, **tiers.get(tier, {}))
    assert after.turn(1, **RESUME).status.context_len == 14
    assert find(after).kv_len == find(before).kv_len == 13
    assert after.runner.batches == []
    assert go_on(after) == go_on(before)
    assert find(after).stored is None
    assert go_on(after) == go_on(before)
    after.engine.stop()
    (claimed,) = files(tmp_path, ".claimed")
    assert claimed.stat().st_size == 8 + int.from_bytes(claimed.read_bytes()[:8], "little")


def test_kv_waits_in_its_file_until_a_turn_wants_it(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    assert after.pool.num_free == after.pool.num_pages
    size = files(tmp_path, ".claimed")[0].stat().st_size
    assert size > find(after).stored.image.num_bytes  # type: ignore[union-attr]
    after.turn(1, end=True)
    after.engine.stop()
    assert files(tmp_path, ".claimed")[0].stat().st_size < size


@pytest.mark.parametrize("trouble", ["flipped bit", "truncated", "another page_size", "no tokens of it", "gone"])
def test_kv_that_cannot_be_used_is_computed_again(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    live(before)
    save_with_kv(before, directory)
    if trouble == "no tokens of it":
        snapshot = saved(before)
        kv = copied_kv(before)
        directory.add_kv(snapshot, replace(kv, state=replace(kv.state, kv_len=14)))
    (file,) = files(tmp_path, ".snapshot")
    after = restarted(directory, page_size=8 if trouble == "another page_size" else 4)
    if trouble == "flipped bit":
        flip_last_bit(file)
    if trouble == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    after.turn(1, **RESUME)
    if trouble == "gone":
        files(tmp_path, ".claimed")[0].unlink()
    tokens, _ = go_on(before)
    assert go_on(after) == (tokens, 17)
    assert "KV of session 1 is computed again" in caplog.text or "KV is computed again" in caplog.text
    assert go_on(after) == go_on(before)


def test_a_windows_kv_goes_on_where_it_had_slid_to(before: FakeDriver, directory: SnapshotDirectory) -> None:
    window = {"overflow": "window", "window_tokens": 16, "sink_tokens": 4}
    before = FakeDriver(max_context=128, window_slack=4)
    before.turn(1, [*range(1, 60)], start=True, max_tokens=30, temperature=0, **window)
    assert find(before).table.num_evicted > 40
    save_with_kv(before, directory)
    after = restarted(directory, max_context=128, window_slack=4)
    after.turn(1, **RESUME)
    for _ in range(8):
        assert go_on(after) == go_on(before)
    assert after.turn(1, rewind_to=len(find(after).context) - 3, max_tokens=0).error is None


def test_a_branch_of_what_was_just_taken_up_shares_its_kv(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    branch = after.turn(2, [9], start=True, fork_of="1", max_tokens=3, temperature=0)
    tokens, num_computed = go_on(before)
    assert (branch.token_ids, branch.status.usage["computed_tokens"]) == (tokens, num_computed)
    assert go_on(after) == (tokens, num_computed)


def test_a_turn_that_is_cancelled_while_kv_comes_leaves_no_memory_taken(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    _, turn = after.post(1, [9], max_tokens=3)
    after.engine.step()
    after.engine.cancel(turn)
    storage = after.engine._tiers.storage
    settle(after)
    after.steps(3)
    assert storage.host.used_bytes == 0
    assert go_on(after) == go_on(before)
