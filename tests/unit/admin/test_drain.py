"""Tests of admin.drain: KV is saved as far as there is time and room, and never at the cost of a session."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.admin.drain import Drained, drain
from microturn.engine.maintenance import Maintenance
from microturn.errors import DeadlineExceeded, ResourceExhausted
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.storage import Content
from support.fake_runner import expected_tokens
from support.threads import ThreadedDriver, starting_engines

Start = Callable[..., ThreadedDriver]
NUM_SESSIONS = 5


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines that save their sessions in one place."""
    with starting_engines() as start_engine:

        def start(**settings: Any) -> ThreadedDriver:
            directory = SnapshotDirectory(tmp_path / "sessions", ttl_s=60)
            return start_engine(snapshots=directory, max_context=64, **settings)

        yield start


def fill(driver: ThreadedDriver) -> None:
    """Sessions that were active one after the other, the last one last; what goes to the disk is there."""
    for session_id in range(NUM_SESSIONS):
        driver.ask(session_id, [session_id, *range(40)], start=True, max_tokens=2).wait()
        if driver.engine.settings.disk_tier_dir:
            while any(session["kv"] == "host" for session in driver.engine.call(Maintenance.describe)):
                time.sleep(0.01)


def before_kv(monkeypatch: pytest.MonkeyPatch, happens: Callable[[Any], None]) -> None:
    """What happens before KV is written, given its session's id."""
    save, add_kv = SnapshotDirectory.save, SnapshotDirectory.add_kv

    def save_then(self: SnapshotDirectory, snapshot: Any, kv: Any = None, **kwargs: Any) -> None:
        if kv is not None:
            happens(snapshot.header.session_id)
        save(self, snapshot, kv, **kwargs)

    def add_then(self: SnapshotDirectory, snapshot: Any, *args: Any, **kwargs: Any) -> bool:
        happens(snapshot.header.session_id)
        return add_kv(self, snapshot, *args, **kwargs)

    monkeypatch.setattr(SnapshotDirectory, "save", save_then)
    monkeypatch.setattr(SnapshotDirectory, "add_kv", add_then)


class Halt:
    """A drain that stands still as it writes the KV of one session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: ThreadedDriver, session_id: int) -> None:
        self._has_come, self._may_go = threading.Event(), threading.Event()

        def halt(found: Any) -> None:
            if found == session_id:
                self._has_come.set()
                assert self._may_go.wait(30)

        before_kv(monkeypatch, halt)
        self.drained: list[Drained] = []
        self._thread = threading.Thread(target=lambda: self.drained.append(drain(driver.engine, 30)))

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has_come.wait(30)

    def __exit__(self, *_: object) -> None:
        self._may_go.set()
        self._thread.join()


def with_kv(tmp_path: Path) -> set[int]:
    """The sessions whose KV is saved."""
    directory = SnapshotDirectory(tmp_path / "sessions", ttl_s=60)
    found = {session_id: directory.find(session_id) for session_id in range(NUM_SESSIONS)}
    assert all(found.values())
    return {session_id for session_id, snapshot in found.items() if snapshot is not None and snapshot.kv is not None}


def check_all_go_on(driver: ThreadedDriver, with_kv: set[int]) -> None:
    """All of them say what they would have said, and those with KV compute what is new."""
    for session_id in range(NUM_SESSIONS):
        history = [session_id, *range(40)]
        history += [*expected_tokens(history, 2), 50]
        answer = driver.ask(session_id, [50], max_tokens=3, start=True, resume=True).wait()
        assert answer.token_ids == expected_tokens(history, 3)
        assert answer.status.usage["computed_tokens"] == (4 if session_id in with_kv else 46)


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_all_kv_is_saved_wherever_it_is(start: Start, tmp_path: Path, tier: str) -> None:
    (tmp_path / "tier").mkdir()
    settings: dict[str, Any] = {"host": {"host_tier_bytes": 1 << 20}, "disk": {"disk_tier_dir": str(tmp_path / "tier")}}
    before = start(num_pages=128 if tier == "none" else 32, **settings.get(tier, {}))
    fill(before)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=5)
    everyone = set(range(NUM_SESSIONS))
    assert with_kv(tmp_path) == everyone
    check_all_go_on(start(), everyone)


def test_what_was_just_taken_up_is_saved_with_its_kv_again(start: Start) -> None:
    first = start()
    fill(first)
    drain(first.engine, 10)
    second = start()
    for session_id in range(NUM_SESSIONS):
        second.ask(session_id, [], start=True, resume=True).wait()
    assert drain(second.engine, 10) == Drained(saved=5, failed=0, with_kv=5)
    check_all_go_on(start(), set(range(NUM_SESSIONS)))


def test_the_last_active_go_first_and_those_that_do_not_fit_the_time_stay_without(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk on which the KV of a session takes 0.4 s, and 0.95 s are there."""
    before_kv(monkeypatch, lambda _: time.sleep(0.4))
    before = start()
    fill(before)
    begun_s = time.monotonic()
    drained = drain(before.engine, 1)
    assert time.monotonic() - begun_s < 2
    assert (drained.saved, drained.failed) == (5, 0)
    assert 1 <= drained.with_kv <= 2  # one on a machine that is busy with something else
    newest = {3, 4} if drained.with_kv == 2 else {4}
    assert with_kv(tmp_path) == newest
    assert list(before.engine.copies.owned()) == []
    check_all_go_on(start(), newest)


def test_on_a_full_disk_the_sessions_stay_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def take_one(session_id: Any) -> None:
        if session_id != NUM_SESSIONS - 1:
            raise ResourceExhausted("no room")

    before_kv(monkeypatch, take_one)
    before = start()
    fill(before)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=1)
    assert (
        "session 3, and those behind it, are not handed over by the snapshot directory: RESOURCE_EXHAUSTED"
        in caplog.text
    )
    assert "session 3, and those that were active before it, is saved without KV" in caplog.text
    check_all_go_on(start(), {4})


def test_kv_that_cannot_be_read_is_left_out(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    fill(first)
    drain(first.engine, 10)
    second = start()
    for session_id in range(NUM_SESSIONS):
        second.ask(session_id, [], start=True, resume=True).wait()
    for file in (tmp_path / "sessions").glob("*.claimed"):
        file.write_bytes(file.read_bytes()[:-1])
    assert drain(second.engine, 10) == Drained(saved=5, failed=0, with_kv=0)
    assert "session 4 goes without its KV" in caplog.text
    check_all_go_on(start(), set())


def test_a_turn_that_comes_while_its_session_is_saved_finds_the_kv_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were refused before any KV was saved: whose turn came in that time was taken up elsewhere without it."""
    before = start()
    fill(before)
    halt = Halt(monkeypatch, before, NUM_SESSIONS - 1)
    with halt:
        late = before.ask(NUM_SESSIONS - 1, [50], max_tokens=3)
        # Others live as before, and are saved with what they say now.
        history = [0, *range(40)]
        history += [*expected_tokens(history, 2), 50]
        assert before.ask(0, [50], max_tokens=3).wait().token_ids == expected_tokens(history, 3)
        # But nobody opens a session here.
        assert before.ask(99, [1], start=True).wait().code == "UNAVAILABLE"
        assert not late.is_done
    assert late.wait().code == "UNAVAILABLE"
    assert halt.drained == [Drained(saved=5, failed=0, with_kv=5)]
    after = start()
    history += [*expected_tokens(history, 3), 51]
    answer = after.ask(0, [51], max_tokens=3, start=True, resume=True).wait()
    assert (answer.token_ids, answer.status.usage["computed_tokens"]) == (expected_tokens(history, 3), 4)
    answer = after.ask(NUM_SESSIONS - 1, [50], max_tokens=3, start=True, resume=True).wait()
    assert answer.status.usage["computed_tokens"] == 4


def test_who_has_gone_elsewhere_is_told_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    before = start()
    fill(before)
    with Halt(monkeypatch, before, 0):  # the last
        for resume in (False, True):
            options = {"start": True, "resume": True} if resume else {}
            assert before.ask(NUM_SESSIONS - 1, [50], **options).wait().code == "UNAVAILABLE"


def test_who_closes_a_session_while_it_is_saved_closes_it_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start()
    fill(before)
    halt = Halt(monkeypatch, before, 2)
    with halt:
        ended = before.ask(2, [], end=True)
    assert ended.wait().code == "UNAVAILABLE"  # its client closes it where it is then
    assert halt.drained == [Drained(saved=5, failed=0, with_kv=5)]
    assert start().ask(2, [], start=True, resume=True, end=True).wait().status.finish_reason == "closed"


def test_a_session_that_ends_while_it_is_saved_does_not_come_back(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start()
    fill(before)
    halt = Halt(monkeypatch, before, 2)
    with halt:
        # An END whose turn is refused closes its session all the same.
        assert before.ask(2, [], end=True, turn=77).wait().code == "FAILED_PRECONDITION"
    assert halt.drained == [Drained(saved=4, failed=0, with_kv=4)]
    assert SnapshotDirectory(tmp_path / "sessions", ttl_s=60).find(2) is None


def test_a_session_that_cannot_be_saved_goes_on_until_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise ResourceExhausted("no room")

    before_kv(monkeypatch, fail)
    before = start()
    fill(before)
    before.engine.call(Maintenance.leave)
    held = before.engine.call(lambda sessions: sessions.hold(4))
    assert held is not None
    assert before.engine.call(lambda sessions: sessions.hold(4)) is None
    waiting = before.ask(4, [50], max_tokens=3)
    before.engine.call(lambda sessions: sessions.copies.end(held.copying))
    before.engine.call(lambda sessions: sessions.let_go(held.copy))
    history = [4, *range(40)]
    history += [*expected_tokens(history, 2), 50]
    assert waiting.wait().token_ids == expected_tokens(history, 3)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=0)
    check = start().ask(4, [51], max_tokens=1, start=True, resume=True).wait()
    assert check.token_ids == expected_tokens([*history, *expected_tokens(history, 3), 51], 1)


def test_what_fails_for_one_session_holds_up_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is that fails: a session that is too big for the memory took all others with it."""

    def fail_once(session_id: Any) -> None:
        if session_id == 3 and "not handed over" not in caplog.text:
            raise RuntimeError("no memory")

    before_kv(monkeypatch, fail_once)
    before = start()
    fill(before)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=5)
    assert "session 3 is not handed over" in caplog.text
    check_all_go_on(start(), set(range(NUM_SESSIONS)))


def test_a_session_that_is_too_big_for_the_time_holds_up_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_too_slow(session_id: Any) -> None:
        if session_id == 3:
            raise DeadlineExceeded("no time")

    before_kv(monkeypatch, is_too_slow)
    before = start()
    fill(before)
    # At the end, when only it is left, it is tried once more.
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=4)
    check_all_go_on(start(), {0, 1, 2, 4})


def test_sessions_without_kv_are_not_saved_beyond_the_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SnapshotDirectory.save
    saved_s: list[float] = []

    def save_slowly(self: SnapshotDirectory, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        if kwargs:  # one by one
            time.sleep(0.25)
            saved_s.append(time.monotonic())

    monkeypatch.setattr(SnapshotDirectory, "save", save_slowly)
    before = start()
    for session_id in range(NUM_SESSIONS):
        before.ask(session_id, [session_id], start=True, max_tokens=0).wait()
    begun_s = time.monotonic()
    assert drain(before.engine, 1).saved == NUM_SESSIONS
    assert 1 <= len(saved_s) < NUM_SESSIONS
    assert all(one_s - begun_s < 0.6 + 0.5 for one_s in saved_s)


def test_a_branch_of_a_session_that_is_being_saved_speaks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    before = start()
    fill(before)
    with Halt(monkeypatch, before, NUM_SESSIONS - 1):
        # In place of a session that lives, for a new one is not opened any more.
        before.ask(0, [7], start=True, fork_of=str(NUM_SESSIONS - 1), max_tokens=2).wait()
        assert before.ask(0, [8], max_tokens=2).wait().error is None


def test_what_a_storage_refuses_for_a_moment_is_saved_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write, refused = start(), FileStorage.write, []

    def refuse(self: FileStorage, name: str, content: Content) -> None:
        if len(refused) < 3 * NUM_SESSIONS:
            refused.append(name)
            raise OSError(errno.EIO, "Input/output error", name)
        write(self, name, content)

    fill(before)
    monkeypatch.setattr(FileStorage, "write", refuse)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=5)
    check_all_go_on(start(), set(range(NUM_SESSIONS)))


def test_the_rest_is_saved_side_by_side(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket takes a tenth of a second for each."""
    monkeypatch.setattr("microturn.admin.drain._SHARE_OF_TURNS", 0)
    monkeypatch.setattr("microturn.admin.drain._SHARE_UNTIL_KV_ENDS", 0)
    before, write, all_at_once = start(), FileStorage.write, threading.Barrier(NUM_SESSIONS)

    def write_with_the_others(self: FileStorage, name: str, content: Content) -> None:
        all_at_once.wait(10)
        write(self, name, content)

    fill(before)
    monkeypatch.setattr(FileStorage, "write", write_with_the_others)
    assert drain(before.engine, 10) == Drained(saved=5, failed=0, with_kv=0)
    check_all_go_on(start(), set())


def test_a_storage_that_hangs_does_not_hold_up_the_stop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    before, may_go_on = start(), threading.Event()
    fill(before)
    monkeypatch.setattr("microturn.admin.drain._SHARE_OF_TURNS", 0)
    monkeypatch.setattr(FileStorage, "write", lambda *_: may_go_on.wait(30))
    begun_s = time.monotonic()
    assert drain(before.engine, 1) == Drained(saved=0, failed=5, with_kv=0)
    assert time.monotonic() - begun_s < 5
    may_go_on.set()
