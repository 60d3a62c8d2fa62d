"""Tests of admin.saver: sessions go on elsewhere from what was saved last, whatever has befallen their server."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.admin import drain as draining
from microturn.admin.drain import drain
from microturn.admin.operations import Operations
from microturn.admin.saver import Saver
from microturn.engine.maintenance import Maintenance
from microturn.errors import ResourceExhausted
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.names import name_of
from microturn.snapshots.storage import Content
from support.fake_runner import expected_tokens
from support.snapshots import RESUME
from support.threads import ThreadedDriver, starting_engines

FAR_S = 1e6  # no round comes by itself
OPTIONS = {"sink_tokens": 4, "window_tokens": 16, "overflow": "window"}


class Server:
    """A server that saves into a directory when it is told to."""

    def __init__(self, driver: ThreadedDriver, directory: SnapshotDirectory, every_s: float) -> None:
        self.driver = driver
        self.saver = Saver(driver.engine, directory, every_s)
        self.history: list[int] = []

    def ask(self, given: list[int], max_tokens: int = 2, **values: Any) -> Any:
        """A turn of session 1; what it leaves must be right."""
        answer = self.driver.ask(1, given, max_tokens=max_tokens, **values).wait()
        assert answer.error is None
        if "rewind_to" in values:
            del self.history[values["rewind_to"] :]
        self.history += given
        assert answer.token_ids == expected_tokens(self.history, max_tokens)
        self.history += answer.token_ids
        return answer

    def save(self) -> bool:
        self.saver._forget_ended()
        return self.saver._save_all()


StartServer = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    with starting_engines() as start_engine:
        servers: list[Server] = []

        def start(
            *, every_s: float = FAR_S, storage: Callable[[Path], FileStorage] = FileStorage, **settings: Any
        ) -> Server:
            path = tmp_path / "sessions"
            path.mkdir(exist_ok=True)
            directory = SnapshotDirectory(storage(path), ttl_s=60)
            driver = start_engine(**{"snapshots": directory, "max_context": 4096, "num_pages": 4096, **settings})
            servers.append(Server(driver, directory, every_s))
            return servers[-1]

        yield start
        for server in servers:
            server.saver.close()


def pages_in(tmp_path: Path) -> list[int]:
    """Bytes of each file with KV, in the order in which they were written."""
    return [file.stat().st_size for file in sorted(tmp_path.glob("sessions/*.kv/*"))]


def goes_on(before: Server, start: StartServer, **settings: Any) -> Server:
    """Another server on which the session of one that has died goes on."""
    after = start(**settings)
    after.history = list(before.history)
    after.ask([9, 9], 3, **RESUME)
    return after


@pytest.mark.parametrize("settings", [{}, {"window": 16}, {"is_asynchronous": True}])
def test_a_session_goes_on_from_what_was_saved_last(start: StartServer, settings: dict[str, Any]) -> None:
    before = start(**settings)
    before.ask([1, 2, 3], start=True)
    for number in range(5):
        before.ask([number] * 7)
        before.save()
    after = goes_on(before, start, **settings)
    assert after.driver.runner.num_tokens == 5  # the last token of the context, two of input, two of three


def test_only_what_has_come_since_is_written(start: StartServer, tmp_path: Path) -> None:
    before = start()
    before.ask([5] * 1000, start=True)
    before.save()
    (whole,) = pages_in(tmp_path)
    before.ask([6])
    before.save()
    assert pages_in(tmp_path)[0] == whole
    assert pages_in(tmp_path)[1] < whole / 20
    before.save()
    assert len(pages_in(tmp_path)) == 2  # nothing has come
    goes_on(before, start)


def test_what_is_cut_back_is_written_again(start: StartServer) -> None:
    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    before.ask([6] * 100, rewind_to=50)
    before.save()
    goes_on(before, start)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("seed", range(6))
def test_any_history(start: StartServer, monkeypatch: pytest.MonkeyPatch, window: int | None, seed: int) -> None:
    """Turns and cuts of any length, saved now and then, in a pool so small that KV goes to host memory."""
    monkeypatch.setattr("microturn.admin.saver.MAX_FILES", 5)
    settings = {"window": window, "num_pages": 100, "max_context": 380, "host_tier_bytes": 1 << 24, "window_slack": 8}
    chance = random.Random(seed)
    server = start(**settings)
    server.ask([chance.randrange(90) for _ in range(30)], start=True)
    for _ in range(40):
        length = chance.randrange(1, 30)
        room = 380 - 8 - len(server.history)
        cut = {"rewind_to": chance.randrange(1, len(server.history))} if room < 40 or chance.random() < 0.2 else {}
        server.ask([chance.randrange(90) for _ in range(length)], chance.randrange(1, 6), **cut)
        if chance.random() < 0.2:  # pushes the session out of the pool
            server.driver.ask(2, [3] * 300, start=True, max_tokens=1).wait()
        if chance.random() < 0.5:
            server.save()
            if chance.random() < 0.2:
                server = goes_on(server, start, **settings)
    server.save()
    goes_on(server, start, **settings)


def test_a_session_that_ends_leaves_nothing(start: StartServer, tmp_path: Path) -> None:
    before = start()
    before.ask([5] * 10, start=True)
    before.save()
    before.driver.ask(1, [], end=True).wait()
    before.save()
    assert list((tmp_path / "sessions").iterdir()) == []


def test_many_files_become_one(start: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microturn.admin.saver.MAX_FILES", 3)
    before = start()
    before.ask([5] * 10, start=True)
    counts = []
    for _ in range(7):
        before.save()
        counts.append(len(pages_in(tmp_path)))
        before.ask([6] * 5)
    assert counts == [1, 2, 3, 1, 2, 3, 1]
    before.save()
    goes_on(before, start)


@pytest.mark.parametrize("has_died", [True, False])
def test_a_full_disk_loses_nothing_that_was_saved(
    start: StartServer, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ResourceExhausted("the disk is full")

    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    saved = list(before.history)
    before.ask([6] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", fail)
        assert not before.save()
    if has_died:
        before.history = saved
    else:
        assert before.save()
    goes_on(before, start)


def test_rounds_come_by_themselves_and_outlive_errors(
    start: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microturn.admin.saver._PAUSE_S", 0.1)
    calls: list[int] = []
    save_next = SnapshotDirectory.save_next

    def fail_once(self: SnapshotDirectory, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= 2:  # with its KV, and without
            raise ResourceExhausted("the disk is full")
        return save_next(self, *args, **kwargs)

    monkeypatch.setattr(SnapshotDirectory, "save_next", fail_once)
    with caplog.at_level(logging.ERROR):
        before = start(every_s=0.05)
        before.ask([5] * 100, start=True)
        until_s = time.monotonic() + 10
        while not list(tmp_path.glob("sessions/*.snapshot")) and time.monotonic() < until_s:
            time.sleep(0.02)
    assert "the disk is full" in caplog.text
    goes_on(before, start)


def test_a_drain_has_the_last_word(start: StartServer, tmp_path: Path) -> None:
    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    before.ask([6] * 10)
    before.saver.close()
    drain(before.driver.engine, 10)
    assert pages_in(tmp_path) == []  # its KV is in the snapshot
    after = goes_on(before, start)
    assert after.driver.engine.call(Maintenance.describe)[0]["context_len"] == len(after.history)


def test_kv_whose_files_are_gone_is_computed_again(
    start: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    for file in tmp_path.glob("sessions/*.kv/*"):
        file.write_bytes(file.read_bytes()[:-1])
    goes_on(before, start)
    assert "recomputed" in caplog.text


def test_old_kv_is_removed(start: StartServer, tmp_path: Path) -> None:
    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    now_s = time.time()
    SnapshotDirectory(tmp_path / "sessions", ttl_s=60, now=lambda: now_s + 90).purge()
    assert len(pages_in(tmp_path)) == 1
    SnapshotDirectory(tmp_path / "sessions", ttl_s=60, now=lambda: now_s + 150).purge()
    assert list((tmp_path / "sessions").iterdir()) == []


@pytest.mark.parametrize("way", ["a round", "a drain"])
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_kv_that_has_not_been_read_yet_stays(
    start: StartServer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], way: str
) -> None:
    """It is in files of the server that has died until the session has a turn."""
    settings = {"history_bytes": 0, "window_slack": 8} if options else {}
    monkeypatch.setattr(draining, "_SHARE_OF_TURNS", 0)  # so it is saved without KV first
    before = start(**settings)
    before.driver.ask(1, [5] * 300, start=True, max_tokens=2, **options).wait()
    before.save()
    after = start(**settings)
    after.driver.ask(1, [], max_tokens=0, **RESUME).wait()
    if way == "a round":
        after.save()
    else:
        after.saver.close()
        assert drain(after.driver.engine, 10).with_kv == 1
        after = start(**settings)
        after.driver.ask(1, [], max_tokens=0, **RESUME).wait()
    found = after.driver.ask(1, [7], max_tokens=2).wait()
    assert found.token_ids == before.driver.ask(1, [7], max_tokens=2).wait().token_ids
    assert found.status.usage["computed_tokens"] == 3
    assert not found.status.rebuilt


def test_a_copy_that_was_left_behind_leaves_the_newer_one(start: StartServer, tmp_path: Path) -> None:
    """The connection to a server breaks, another takes the session up, and the client's last turn still comes."""
    behind, after = start(), start()
    behind.ask([5] * 30, start=True, idle_timeout_s=1.0)
    behind.save()
    after.history = list(behind.history)
    behind.ask([6] * 4)
    after.ask([], 0, **RESUME)
    for saved_elsewhere in (False, True):
        if saved_elsewhere:
            after.ask([6] * 40)
            after.save()
        files = pages_in(tmp_path)
        behind.ask([6])
        assert behind.save()
        assert pages_in(tmp_path) == files
    until_s = time.monotonic() + 10
    while behind.driver.engine.call(Maintenance.describe) and time.monotonic() < until_s:
        time.sleep(0.05)
        after.ask([], 0)
    behind.save()
    assert pages_in(tmp_path) == files
    goes_on(after, start)


@pytest.mark.parametrize("share_of_turns", [0.6, 0.0])
@pytest.mark.parametrize("saved_elsewhere", [False, True])
def test_a_copy_that_was_left_behind_is_not_saved_at_a_stop(
    start: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_elsewhere: bool, share_of_turns: float
) -> None:
    monkeypatch.setattr(draining, "_SHARE_OF_TURNS", share_of_turns)  # with none, all are saved at the end
    behind, after = start(), start()
    behind.ask([5] * 30, start=True)
    behind.save()
    after.history = list(behind.history)
    behind.ask([6] * 4)
    after.ask([6] * 40, **RESUME)
    if saved_elsewhere:
        after.save()
    drained = drain(behind.driver.engine, 4)
    assert (drained.saved, drained.failed, drained.with_kv) == (1, 0, 0)
    if not saved_elsewhere:
        assert not list(tmp_path.glob("sessions/*.snapshot"))
        after.save()
    goes_on(after, start)


class Nearly(FileStorage):
    """A disk with room for what is small."""

    def write(self, name: str, content: Content) -> None:
        if content.num_bytes > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        super().write(name, content)


def test_a_session_whose_kv_finds_no_room_is_saved_without(start: StartServer, tmp_path: Path) -> None:
    before = start(storage=Nearly)
    before.ask([5] * 3000, start=True)
    for session_id in range(2, 22):
        before.driver.ask(session_id, [5] * 8, start=True, max_tokens=1).wait()
    assert before.save()
    assert len(pages_in(tmp_path)) == 20
    assert len(list(tmp_path.glob("sessions/*.snapshot"))) == 21
    after = start()
    after.history = before.history
    answer = after.ask([9, 9], 3, **RESUME)
    assert answer.status.usage["computed_tokens"] == len(after.history) - 1


def test_sessions_that_cannot_be_saved_do_not_starve_the_others(start: StartServer, tmp_path: Path) -> None:
    refused = {name_of(session_id, "") for session_id in range(10)}

    class Refuses(FileStorage):
        def write(self, name: str, content: Content) -> None:
            if name.partition(".")[0] in refused:
                raise OSError(errno.EIO, "Input/output error", name)
            super().write(name, content)

    before = start(storage=Refuses)
    for session_id in range(40):
        before.driver.ask(session_id, [5] * 8, start=True, max_tokens=1).wait()
    for _ in range(3):
        before.save()
        for session_id in range(20):
            before.driver.ask(session_id, [5], max_tokens=1).wait()
    assert len(list(tmp_path.glob("sessions/*.snapshot"))) == 30


def test_a_storage_that_fails_is_not_asked_for_every_session(
    start: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = start()
    for session_id in range(40):
        before.driver.ask(session_id, [5] * 8, start=True, max_tokens=1).wait()
    asked: list[str] = []

    def fail(_: FileStorage, name: str, __: Content) -> None:
        asked.append(name)
        raise OSError(errno.EIO, "Input/output error", name)

    monkeypatch.setattr(FileStorage, "write", fail)
    assert not before.save()
    assert 8 <= len(asked) <= 16  # eight in a row, and what was under way
    assert "0 of 40 sessions were saved" in caplog.text


def test_a_stop_does_not_wait_for_a_storage_that_hangs(start: StartServer) -> None:
    hangs = threading.Event()

    class Hangs(FileStorage):
        def write(self, name: str, content: Content) -> None:
            hangs.set()
            assert goes_on.wait(30)
            super().write(name, content)

    goes_on = threading.Event()
    before = start(storage=Hangs, every_s=0.1)
    before.ask([5] * 100, start=True)
    assert hangs.wait(10)
    begun_s = time.monotonic()
    operations = Operations(before.driver.engine, None, before.saver.stop)
    drained: list[Any] = []
    thread = threading.Thread(target=lambda: drained.append(operations.answer({"op": "drain", "timeout_s": 2.0})))
    thread.start()
    time.sleep(1.0)
    goes_on.set()
    thread.join(10)
    assert drained
    assert time.monotonic() - begun_s < 2.5
    assert drained[0]["saved"] == 1


def test_what_ends_while_the_server_stops_leaves_nothing(
    start: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the storage cannot remove it at first."""
    monkeypatch.setattr("microturn.admin.saver._PAUSE_S", 0.1)
    before = start()
    before.ask([5] * 10, start=True)
    before.save()
    failed: list[str] = []
    remove = FileStorage.remove

    def fail_once(self: FileStorage, name: str, *rest: Any) -> None:
        if not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error", name)
        remove(self, name, *rest)

    monkeypatch.setattr(FileStorage, "remove", fail_once)
    before.saver.stop(1.0)
    before.driver.ask(1, [], end=True).wait()
    until_s = time.monotonic() + 10
    while list((tmp_path / "sessions").iterdir()) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert failed
    assert list((tmp_path / "sessions").iterdir()) == []
