"""Tests of servers that stop or join: sessions go to the others, and are evened out."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from microturn.admin import received
from microturn.admin.drain import Drained, drain
from microturn.admin.operations import Operations
from microturn.admin.peer_address import Address
from microturn.admin.saver import Saver
from microturn.engine.maintenance import Maintenance
from microturn.errors import Unavailable
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.storage import Content
from support.fake_runner import expected_tokens
from support.fleet_servers import StartServers, go_on, no_room, open_session
from support.snapshots import RESUME


def test_a_server_that_stops_hands_its_sessions_to_the_emptiest(start_servers: StartServers) -> None:
    here, second, third = start_servers(3)
    histories = {number: open_session(here, number) for number in range(10)}
    histories |= {number: open_session(second, number) for number in range(10, 14)}
    assert drain(here.driver.engine, 30, here.fleet.peers) == Drained(saved=10, failed=0, with_kv=10, moved=10)
    assert (len(second.ids()), len(third.ids())) == (7, 7)
    for number, history in histories.items():
        server = second if number in second.ids() else third
        computed = go_on(server, number, history, **RESUME).status.usage["computed_tokens"]
        assert computed == 4


def test_what_no_server_takes_is_saved(start_servers: StartServers, tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    here, there = start_servers(2, max_sessions=3, snapshots=directory)
    histories = {number: open_session(here, number) for number in (1, 2, 3)}
    open_session(there, 4)
    assert drain(here.driver.engine, 30, here.fleet.peers) == Drained(saved=3, failed=0, with_kv=3, moved=2)
    (left,) = histories.keys() - there.ids()
    there.driver.ask(4, [], end=True, session_key="ours").wait()
    assert go_on(there, left, histories[left], **RESUME).status.usage["computed_tokens"] == 4


def test_kv_that_nobody_has_room_for_is_computed_again(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received._Room, "take", no_room)
    here, there = start_servers(2)
    history = open_session(here, 1)
    assert drain(here.driver.engine, 30, here.fleet.peers) == Drained(saved=1, failed=0, with_kv=0, moved=1)
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == len(history) + 3


def test_a_server_that_leaves_takes_nothing(start_servers: StartServers) -> None:
    here, leaving = start_servers(2)
    history = open_session(here, 1)
    leaving.driver.engine.call(Maintenance.leave)
    with pytest.raises(Unavailable, match="stopping"):
        here.do("move", id="1", to=leaving.address)
    go_on(here, 1, history)


def test_a_server_that_leaves_is_given_nothing(start_servers: StartServers) -> None:
    here, leaving, third = start_servers(3)
    leaving.driver.engine.call(Maintenance.leave)
    open_session(here, 1)
    assert here.do("move", id="1")["to"] == third.address


def test_a_session_whose_turn_runs_on_a_server_that_leaves_gets_a_branch(start_servers: StartServers) -> None:
    """No other server could open one before that turn had ended."""
    here, there = start_servers(2)
    history = open_session(here, 1)
    running = here.driver.ask(1, [7], max_tokens=4000, session_key="ours")
    assert running.begun.wait(10)
    here.driver.engine.call(Maintenance.leave)
    branch = here.driver.ask(2, [8], start=True, fork_of="1", max_tokens=2, session_key="ours").wait()
    assert branch.token_ids == expected_tokens([*history, 8], 2)
    here.do("move", id="2", to=there.address)
    go_on(there, 2, [*history, 8, *branch.token_ids], **RESUME)
    for parent in ({}, {"fork_of": "77"}):
        assert here.driver.ask(3, [8], start=True, session_key="ours", **parent).wait().code == "UNAVAILABLE"


def test_a_turn_that_takes_too_long_is_undone_and_its_session_moves(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A turn gets a tenth of a second; behind it there are ten for the session, however slow the machine.
    monkeypatch.setattr("microturn.admin.drain._SHARE_OF_TURNS", 0.01)
    here, there = start_servers(2, max_context=32_768)
    history = open_session(here, 1)
    running = here.driver.ask(1, [7], max_tokens=32_000, session_key="ours")
    assert running.begun.wait(10)
    assert drain(here.driver.engine, 10, here.fleet.peers) == Drained(saved=1, failed=0, with_kv=1, moved=1)
    assert running.wait().code == "UNAVAILABLE"
    go_on(there, 1, history, **RESUME)


def test_a_session_that_is_refused_holds_up_no_other(start_servers: StartServers) -> None:
    """One refusal took the other server from all of them, and none was moved."""
    here, there = start_servers(2)
    for number in range(5):
        open_session(here, number)
    there.driver.ask(4, [5, 6], start=True, max_tokens=2, session_key="another").wait()  # 4 goes first
    assert drain(here.driver.engine, 2, here.fleet.peers) == Drained(saved=4, failed=1, with_kv=4, moved=4)


def test_a_moment_without_room_costs_no_other_session_its_kv(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, refused = received._Room.take, []

    def refuse_one(self: received._Room, *args: int) -> None:
        if not refused:
            refused.append(args)
            no_room()
        take(self, *args)

    here, _ = start_servers(2)
    for number in range(5):
        open_session(here, number)
    monkeypatch.setattr(received._Room, "take", refuse_one)
    assert drain(here.driver.engine, 30, here.fleet.peers) == Drained(saved=5, failed=0, with_kv=4, moved=5)


def test_a_server_that_is_busy_for_a_moment_gets_the_sessions_then(start_servers: StartServers) -> None:
    """For longer than a question may take."""
    here, busy = start_servers(2)
    for number in range(5):
        open_session(here, number)
    has_begun, is_done = threading.Event(), threading.Event()
    step = threading.Thread(target=lambda: busy.driver.engine.call(lambda _: has_begun.set() or is_done.wait(30)))
    step.start()
    assert has_begun.wait(10)
    threading.Timer(1.5, is_done.set).start()
    assert drain(here.driver.engine, 30, here.fleet.peers) == Drained(saved=5, failed=0, with_kv=5, moved=5)
    step.join()


def test_a_server_that_is_alone_stops_at_once(start_servers: StartServers) -> None:
    (alone,) = start_servers(1)
    open_session(alone, 1)
    begun_s = time.monotonic()
    assert drain(alone.driver.engine, 30, alone.fleet.peers) == Drained(saved=0, failed=1, with_kv=0)
    assert time.monotonic() - begun_s < 10


# ---- sessions are evened out ---------------------------------------------------------------------------------------


def test_a_newcomer_gets_its_share(start_servers: StartServers) -> None:
    servers = start_servers(3, moves=6000)
    histories = {number: open_session(servers[0], number) for number in range(30)}
    until_s = time.monotonic() + 30
    counts: list[int] = []
    while counts != [10, 10, 10] and time.monotonic() < until_s:
        time.sleep(0.05)
        counts = [len(server.ids()) for server in servers]
    assert counts == [10, 10, 10]
    time.sleep(0.5)
    assert [len(server.ids()) for server in servers] == counts  # none goes to and fro
    for number, history in histories.items():
        (server,) = (server for server in servers if number in server.ids())
        assert go_on(server, number, history, **RESUME).status.usage["computed_tokens"] == 4


def test_no_more_are_moved_than_may_be(start_servers: StartServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microturn.admin.rebalancer.PAUSE_S", 0.05)
    here, there = start_servers(2, moves=300)
    for number in range(20):
        open_session(here, number)
    begun_s = time.monotonic()
    threading.Event().wait(1.0)
    assert 1 <= len(there.ids()) <= 2 + (time.monotonic() - begun_s) * 300 / 60


def test_a_server_that_has_just_come_is_given_nothing_while_there_are_others(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge may not know it yet, and clients would look for their sessions elsewhere."""
    here, second, third = start_servers(3)
    monkeypatch.setattr("microturn.admin.peers.SETTLED_S", 100.0)
    server = second.fleet._server
    assert server is not None
    server._server.begun_s -= 100.0
    for number in range(4):
        open_session(here, number)
        assert here.do("move", id=str(number))["to"] == second.address
    assert third.ids() == set()


def test_a_directory_that_hangs_keeps_no_session_from_the_other_servers(
    start_servers: StartServers, tmp_path: Path
) -> None:
    hangs, may_go_on = threading.Event(), threading.Event()

    class Hangs(FileStorage):
        def write(self, name: str, content: Content) -> None:
            hangs.set()
            assert may_go_on.wait(30)
            super().write(name, content)

    directory = SnapshotDirectory(Hangs(tmp_path), ttl_s=60)
    here, there = start_servers(2, snapshots=directory)
    with closing(Saver(here.driver.engine, directory, 0.1)) as saver:
        histories = {number: open_session(here, number) for number in range(8)}
        assert hangs.wait(10)
        drained = Operations(here.driver.engine, here.fleet.peers, saver.stop).answer({"op": "drain", "timeout_s": 5.0})
        assert (drained["moved"], there.ids()) == (8, set(histories))
        may_go_on.set()
    for number, history in histories.items():
        go_on(there, number, history)


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_a_server_that_was_cut_off_still_has_is_older(
    start_servers: StartServers, tmp_path: Path, is_moved: bool
) -> None:
    """Its copy beat the session that its client had gone on with, if only by being copied later."""
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    stale, there, third = start_servers(3, snapshots=directory)
    with closing(Saver(stale.driver.engine, directory, 1e6)) as saver:
        history = open_session(stale, 1)
        saver._save_all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(there.fleet.peers, "_find", lambda: ())
            history += [7, *go_on(there, 1, history, **RESUME).token_ids]
        if is_moved:
            stale.do("move", id="1", to=third.address)
        asked = stale if is_moved else third
        history += [7, *go_on(asked, 1, history, **RESUME).token_ids]
        go_on(asked, 1, history)


def test_a_session_that_comes_while_what_is_saved_of_it_is_claimed_is_not_there_twice(
    start_servers: StartServers, tmp_path: Path
) -> None:
    """The engine of the server that was handed it stopped, and with it all of its sessions."""
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    here, there = start_servers(2, snapshots=directory)
    with closing(Saver(here.driver.engine, directory, 1e6)) as saver:
        history, other = open_session(here, 1), open_session(there, 2)
        saver._save_all()
    find, may_find = there.fleet.peers._find, threading.Event()

    def find_late() -> list[Address]:
        assert may_find.wait(30)
        return [address for address in find() if here.address.endswith(f":{address[1]}")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(there.fleet.peers, "_find", find_late)
        resumed = there.driver.ask(1, [7], max_tokens=3, session_key="ours", **RESUME)
        here.do("move", id="1", to=there.address)
        may_find.set()
        assert resumed.wait().token_ids == expected_tokens([*history, 7], 3)
    go_on(there, 2, other)
    until_s = time.monotonic() + 10
    while directory.find_header(1) is None:
        assert time.monotonic() < until_s, "what is saved is not there any more, should this server die"
        time.sleep(0.01)
