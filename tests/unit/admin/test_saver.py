"""Tests of admin.saver: sessions go on elsewhere from what was saved last, whatever has befallen their server."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.admin.drain import drain
from microturn.admin.saver import Saver
from microturn.engine.maintenance import Maintenance
from microturn.errors import ResourceExhausted
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file_storage import FileStorage
from support.fake_runner import expected_tokens
from support.snapshots import RESUME
from support.threads import ThreadedDriver, starting_engines

FAR_S = 1e6  # no round comes by itself


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

    def save(self) -> None:
        self.saver._forget_ended()
        self.saver._save_all()


StartServer = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    with starting_engines() as start_engine:
        servers: list[Server] = []

        def start(*, every_s: float = FAR_S, **settings: Any) -> Server:
            directory = SnapshotDirectory(tmp_path / "sessions", ttl_s=60)
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


def test_a_full_disk_loses_nothing_that_was_saved(start: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ResourceExhausted("the disk is full")

    before = start()
    before.ask([5] * 100, start=True)
    before.save()
    saved = list(before.history)
    before.ask([6] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", fail)
        with pytest.raises(ResourceExhausted):
            before.save()
    after = start()
    after.history = saved
    after.ask([9], 3, **RESUME)  # it is what was saved before
    before.save()
    goes_on(before, start)


def test_rounds_come_by_themselves_and_outlive_errors(
    start: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microturn.admin.saver._PAUSE_S", 0.1)
    calls: list[int] = []
    save_next = SnapshotDirectory.save_next

    def fail_once(self: SnapshotDirectory, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ResourceExhausted("the disk is full")
        return save_next(self, *args)

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
