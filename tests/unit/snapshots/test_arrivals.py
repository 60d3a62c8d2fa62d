"""Tests of snapshots.arrivals: clients that come back to what was saved, through a whole engine."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from microturn.settings import TENANT_HEADER
from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver, expected_tokens
from support.snapshots import FAR_S, KEY, RESUME, Restart, files, find, live, saved

DENIED = "PERMISSION_DENIED: the session belongs to somebody else: bring the session_key that its START set"


def save(before: FakeDriver, directory: SnapshotDirectory, session_id: int = 1, **values: Any) -> None:
    directory.save(saved(before, session_id, **values))


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
    given = {"turn": 0, "max_tokens": 3, "logprobs": 3}
    options = {"session_priority": 2, "idle_timeout_s": 30, "max_context": 200, "cache_salt": "salt"}
    options |= {"temperature": 0.7, "top_k": 40, "stop_token_ids": "[96]", "seed": 11}
    again = after.turn(1, [5, 6, 7], start=True, **given, **options)
    assert again.status.replayed
    assert again.token_ids == first.token_ids
    assert again.outputs[0].top_logprobs == sum((output.top_logprobs for output in first.outputs), ())
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
    before: FakeDriver, directory: SnapshotDirectory, restart: Restart, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    after = restart()
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
    before: FakeDriver,
    directory: SnapshotDirectory,
    restart: Restart,
    tmp_path: Path,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live(before)
    save(before, directory)
    if trouble == "damaged":
        (file,) = files(tmp_path, ".snapshot")
        file.write_bytes(file.read_bytes()[:100])
    after = restart(
        max_context=13 if trouble == "too long" else 256,
        model_fingerprint="another" if trouble == "another model" else "the test's",
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


def test_a_saved_session_is_still_its_tenants(directory: SnapshotDirectory, restart: Restart) -> None:
    before = FakeDriver(max_context=256, max_sessions_per_tenant=2)
    ours = {TENANT_HEADER: "ours"}
    live(before, **ours)
    save(before, directory)
    salt = find(before).prefix_salt
    after = restart(max_sessions_per_tenant=2)
    for theirs in ({}, {TENANT_HEADER: "theirs"}):
        assert str(after.turn(1, [9], **RESUME, **theirs).error) == DENIED
    assert after.turn(1, [9], max_tokens=2, **RESUME, **ours).error is None
    assert str(after.turn(1, [9]).error) == DENIED
    assert (find(after).tenant, find(after).prefix_salt) == ("ours", salt)


def test_with_the_key_the_session_goes_on_and_keeps_it(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before, **KEY)
    save(before, directory)
    assert after.turn(1, [9], max_tokens=0, **RESUME, **KEY).status.context_len == 15
    assert str(after.turn(1, [9]).error) == DENIED
    assert after.turn(1, end=True, **KEY).status.finish_reason == "closed"


def test_where_there_is_no_room_the_session_stays_saved(
    before: FakeDriver, directory: SnapshotDirectory, restart: Restart, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    after = restart(max_sessions=1)
    after.turn(2, [5], start=True)
    assert after.turn(1, **RESUME).code == "RESOURCE_EXHAUSTED"
    assert len(files(tmp_path, ".snapshot")) == 1
    after.turn(2, end=True)
    assert after.turn(1, **RESUME).status.context_len == 14


# ---- what is out of date, expired, damaged or another model's ------------------------------------------------------


def test_an_older_copy_is_refused_once_a_newer_one_was_taken_up(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, restart: Restart, tmp_path: Path
) -> None:
    live(before)
    save(before, directory, epoch=1)
    (file,) = files(tmp_path, ".snapshot")
    shutil.copy(file, tmp_path / "backup")
    save(before, directory, epoch=2)
    after.turn(1, **RESUME)
    after.turn(1, end=True)
    shutil.copy(tmp_path / "backup", file)
    for server in (after, restart()):
        answer = server.turn(1, **RESUME)
        assert answer.code == "FAILED_PRECONDITION"
        assert "out of date" in str(answer.error)


def test_a_session_of_a_recycled_id_is_newer_than_any_copy_of_the_earlier_one(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, restart: Restart
) -> None:
    before.turn(1, [1, 2, 3], start=True, max_tokens=0)
    save(before, directory, epoch=find(before).epoch + 1)
    after.turn(1, **RESUME)
    after.turn(1, [7, 8], start=True, max_tokens=0)
    assert find(after).epoch > find(before).epoch
    directory.save(saved(after, epoch=find(after).epoch + 1))
    assert restart().turn(1, max_tokens=0, **RESUME).status.context_len == 2


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
    before: FakeDriver, directory: SnapshotDirectory, restart: Restart, tmp_path: Path
) -> None:
    live(before)
    save(before, directory)
    other = restart(model_fingerprint="another")
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
    assert "cannot be restored" in caplog.text
    assert after.runner.batches == []
    assert after.turn(1, [9], **RESUME).code == "NOT_FOUND"


def test_a_session_far_from_its_end_is_not_expired(directory: SnapshotDirectory, before: FakeDriver) -> None:
    live(before)
    assert not directory.is_expired(saved(before, expires_s=FAR_S).header)


def test_what_a_newer_version_saved_is_left_to_it_and_the_client_is_told(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    """It was renamed `.damaged`, so that after a rollback and a second upgrade the session was lost."""
    live(before)
    save(before, directory)
    (file,) = files(tmp_path, ".snapshot")
    content = file.read_bytes()
    newer = content.replace(b'"format_version":"1"', b'"format_version":"9"')
    file.write_bytes(newer)
    answer = after.turn(1, [9], max_tokens=2, **RESUME)
    assert answer.code == "FAILED_PRECONDITION"
    assert "saved by a newer version" in str(answer.error)
    assert file.read_bytes() == newer
    file.write_bytes(content)
    assert after.turn(1, [9], max_tokens=2, **RESUME).status.context_len == 17


def test_what_expires_is_removed_while_the_server_runs(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    """What had expired stood in the directory in plain text until a server was started there."""
    live(before)
    after.turn(2, [5], start=True, max_tokens=0)
    save(before, directory)
    assert len(files(tmp_path, ".snapshot")) == 1
    directory._now = lambda: FAR_S
    after.clock.now_s += 3600
    after.steps(1)
    deadline_s = time.monotonic() + 10
    while files(tmp_path, ".snapshot"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
