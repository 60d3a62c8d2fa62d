"""Tests of hand-over between servers: engines on threads of their own, real sockets."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from microturn.admin import hand_over, received
from microturn.admin.drain import Drained, drain
from microturn.admin.fleet import Fleet
from microturn.admin.operations import Operations
from microturn.admin.peer_server import route_to
from microturn.admin.peers import PeerConnection
from microturn.engine.maintenance import Maintenance
from microturn.errors import InvalidArgument, MicroturnError, NotFound, PermissionDenied, ResourceExhausted, Unavailable
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import expected_tokens
from support.snapshots import RESUME
from support.threads import Answer, ThreadedDriver, starting_engines


class Server:
    """One of several servers, which know each other."""

    def __init__(self, driver: ThreadedDriver, fleet: Fleet, port: int) -> None:
        self.driver = driver
        self.fleet = fleet
        self.address = f"127.0.0.1:{port}"
        self.route = route_to(f"10.0.0.1:{port}")
        fleet.join(driver.engine)

    def ids(self) -> set[Any]:
        return {session["id"] for session in self.driver.engine.call(Maintenance.describe)}

    def do(self, op: str, **arguments: Any) -> Any:
        return Operations(self.driver.engine, self.fleet.peers).answer({"op": op, **arguments})


StartServers = Callable[..., list[Server]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def start_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServers]:
    with starting_engines() as start, ExitStack() as stack:
        monkeypatch.setattr("microturn.admin.rebalancer.SETTLED_S", 0.0)
        monkeypatch.setattr("microturn.admin.drain._TELLING_S", 0.0)

        def start_servers(number: int, *, key_file: str = "", moves: int = 0, **settings: Any) -> list[Server]:
            ports = [free_port() for _ in range(number)]
            servers = []
            for port in ports:
                fleet = Fleet(
                    Settings(
                        peer_address=f"127.0.0.1:{port}",
                        peers=",".join(f"127.0.0.1:{other}" for other in ports),
                        peer_key_file=key_file,
                        edge_address=f"10.0.0.1:{port}",
                        moves_per_minute=moves,
                    )
                )
                driver = start(**{"max_context": 4096, "num_pages": 8192, **settings}, fetch=fleet.peers.fetch)
                servers.append(Server(driver, fleet, port))
                stack.callback(fleet.leave)
            return servers

        yield start_servers


@pytest.fixture
def two(start_servers: StartServers) -> list[Server]:
    return start_servers(2)


def open_session(server: Server, session_id: int, length: int = 40) -> list[int]:
    """A session with so many tokens of input; its history."""
    given = random.Random(session_id).choices(range(90), k=length)
    answer = server.driver.ask(session_id, given, start=True, max_tokens=2, session_key="ours").wait()
    return [*given, *answer.token_ids]


def go_on(server: Server, session_id: int, history: list[int], **values: Any) -> Answer:
    """A turn on a server where a session should live; checks its tokens."""
    answer = server.driver.ask(session_id, [7], max_tokens=3, session_key="ours", **values).wait()
    assert answer.error is None
    assert answer.token_ids == expected_tokens([*history, 7], 3)
    return answer


# ---- a session is moved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 40, 3000])
@pytest.mark.parametrize("is_sent_ahead", [False, True])
def test_a_session_goes_on_elsewhere_and_computes_nothing_again(
    two: list[Server], monkeypatch: pytest.MonkeyPatch, length: int, is_sent_ahead: bool
) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0 if is_sent_ahead else 1 << 40)
    here, there = two
    history = open_session(here, 1, length)
    told = here.do("move", id="1")
    assert (told["id"], told["context_len"], told["kv_len"], told["to"]) == (1, length + 2, length + 1, there.address)
    assert (here.ids(), there.ids()) == (set(), {1})
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == 2 + 2


def test_only_what_came_since_is_sent_while_the_session_is_held(
    two: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 3000)
    sent: list[int] = []
    send, send_ahead = PeerConnection.send, PeerConnection.send_ahead

    def note_ahead(self: PeerConnection, kv: Any) -> str:
        sent.append(kv.pages.num_pages)
        transfer = send_ahead(self, kv)
        history.extend([8, *here.driver.ask(1, [8], max_tokens=4, session_key="ours").wait().token_ids])
        return transfer

    def note(self: PeerConnection, snapshot: Any, kv: Any, transfer: str = "") -> str | None:
        sent.append(kv.pages.num_pages)
        return send(self, snapshot, kv, transfer)

    monkeypatch.setattr(PeerConnection, "send_ahead", note_ahead)
    monkeypatch.setattr(PeerConnection, "send", note)
    here.do("move", id="1", to=there.address)
    assert sent == [751, 2]  # 3,001 and 3,006 tokens, on pages of four
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == 4


def test_a_session_that_is_rewound_meanwhile_is_sent_as_it_is_then(
    two: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 100)
    send_ahead = PeerConnection.send_ahead

    def rewind(self: PeerConnection, kv: Any) -> str:
        transfer = send_ahead(self, kv)
        rewound = here.driver.ask(1, [9] * 60, max_tokens=2, rewind_to=50, session_key="ours").wait()
        history[50:] = [*[9] * 60, *rewound.token_ids]
        return transfer

    monkeypatch.setattr(PeerConnection, "send_ahead", rewind)
    here.do("move", id="1")
    go_on(there, 1, history, **RESUME)


def test_a_session_of_layers_with_windows_moves(start_servers: StartServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = start_servers(2, window=16)
    history = open_session(here, 1, 500)
    here.do("move", id="1")
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == 4


def test_a_session_with_kv_in_host_memory_moves(start_servers: StartServers) -> None:
    here, there = start_servers(2, num_pages=150, max_context=512, host_tier_bytes=1 << 30)
    histories = [open_session(here, number, 480) for number in (1, 2)]
    assert {session["kv"] for session in here.driver.engine.call(Maintenance.describe)} == {"device", "host"}
    for number, history in zip((1, 2), histories, strict=True):
        here.do("move", id=str(number))
        assert go_on(there, number, history, **RESUME).status.usage["computed_tokens"] == 4


def test_turns_that_come_meanwhile_are_told_the_way(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = two
    history = open_session(here, 1)
    waiting: list[Answer] = []
    send = PeerConnection.send

    def send_late(self: PeerConnection, *args: Any) -> str | None:
        waiting.append(here.driver.ask(1, [7], max_tokens=3, session_key="ours"))
        here.driver.engine.call(lambda _: None)  # it has arrived
        assert not waiting[0].ended.is_set()
        return send(self, *args)

    monkeypatch.setattr(PeerConnection, "send", send_late)
    here.do("move", id="1")
    for answer in (waiting[0], here.driver.ask(1, [7], max_tokens=3, session_key="ours")):
        assert str(answer.wait().error).startswith("UNAVAILABLE: the session was moved to another server")
        assert str(answer.error).endswith(f"[route={there.route}]")
    stranger = here.driver.ask(1, [7], max_tokens=3, session_key="another").wait()
    assert stranger.code == "NOT_FOUND"
    go_on(there, 1, history, **RESUME)


def test_a_session_comes_where_its_client_is(start_servers: StartServers) -> None:
    here, there, third = start_servers(3)
    history = open_session(here, 1)
    here.do("move", id="1", to=there.address)
    for server in (third, here, there):
        stranger = server.driver.ask(1, [7], max_tokens=3, session_key="another", **RESUME).wait()
        assert stranger.code == "PERMISSION_DENIED"
        answer = go_on(server, 1, history, **RESUME)
        history += [7, *answer.token_ids]
        assert answer.status.usage["computed_tokens"] == 4
        assert [len(one.ids()) for one in (here, there, third)] == [int(one is server) for one in (here, there, third)]
    assert third.driver.ask(2, [7], max_tokens=3, **RESUME).wait().code == "NOT_FOUND"
    there.fleet.leave()  # as if it had died: here is remembered where the session was, which leads nowhere
    assert here.driver.ask(1, [7], max_tokens=3, session_key="ours", **RESUME).wait().code == "NOT_FOUND"


def test_a_session_comes_to_a_server_whose_last_place_it_has(start_servers: StartServers) -> None:
    here, there = start_servers(2, max_sessions=1)
    history = open_session(here, 1)
    go_on(there, 1, history, **RESUME)
    assert here.ids() == set()


def test_a_client_is_sent_to_a_session_that_cannot_come(start_servers: StartServers) -> None:
    """Its turn runs: it waits to be heard again, which can happen there only."""
    here, there = start_servers(2)
    history = open_session(here, 1)
    running = here.driver.ask(1, [7], max_tokens=3500, session_key="ours")
    assert running.begun.wait(10)
    answer = there.driver.ask(1, [7], max_tokens=3, session_key="ours", **RESUME).wait()
    assert str(answer.error).endswith(f"[route={here.route}]")
    assert running.wait().token_ids[:3] == expected_tokens([*history, 7], 3)


def test_a_server_that_leaves_says_the_way_to_its_sessions(two: list[Server]) -> None:
    here, there = two
    open_session(here, 1)
    here.driver.engine.call(Maintenance.leave)
    here.do("move", id="1")
    for values in ({}, RESUME):
        answer = here.driver.ask(1, [7], max_tokens=3, session_key="ours", **values).wait()
        assert str(answer.error).endswith(f"[route={there.route}]")


def test_a_session_goes_there_and_back(two: list[Server]) -> None:
    here, there = two
    history = open_session(here, 1)
    for source, target in ((here, there), (there, here), (here, there)):
        source.do("move", id="1", to=target.address)
        history += [7, *go_on(target, 1, history, **RESUME).token_ids]


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_session_goes_on_here_where_it_cannot_move(two: list[Server], start_servers: StartServers) -> None:
    here, there = two
    history = open_session(here, 1)
    (alone,) = start_servers(1)
    for arguments, error in (
        ({"to": f"127.0.0.1:{free_port()}"}, Unavailable),  # nobody listens
        ({"to": "nowhere"}, InvalidArgument),
        ({"to": "127.0.0.1:0"}, InvalidArgument),
        ({"to": here.address}, MicroturnError),  # itself
    ):
        with pytest.raises(error):
            here.do("move", id="1", **arguments)
        history += [7, *go_on(here, 1, history).token_ids]
    with pytest.raises(NotFound):
        here.do("move", id="2")
    open_session(alone, 3)
    with pytest.raises(Unavailable, match="no other server"):
        alone.do("move", id="3")
    assert there.ids() == set()


def no_room(*_: Any) -> None:
    raise ResourceExhausted("no room")


@pytest.mark.parametrize("limit", ["max_sessions", "bytes"])
def test_a_full_server_refuses_and_the_session_goes_on_here(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "bytes":
        monkeypatch.setattr(received._Room, "take", no_room)
    here, there = start_servers(2, max_sessions=1)
    history = open_session(here, 1)
    if limit == "max_sessions":
        open_session(there, 2)
    with pytest.raises(ResourceExhausted, match=there.address):
        here.do("move", id="1", to=there.address)
    go_on(here, 1, history)


def test_the_memory_of_what_waits_is_limited_but_for_one_session(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "_SHARE_OF_POOL", 0.0)
    here, there = start_servers(2)
    history = open_session(here, 1)
    open_session(here, 2)
    here.do("move", id="1")
    with pytest.raises(ResourceExhausted, match="bytes of KV wait here"):
        here.do("move", id="2")
    go_on(there, 1, history, **RESUME)


def test_a_copy_that_was_left_behind_gives_way(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server took the session, and its answer was lost: the session goes on here, and moves later."""
    here, there = two
    history = open_session(here, 1)
    send = PeerConnection.send

    def lose_answer(self: PeerConnection, *args: Any) -> str | None:
        send(self, *args)
        raise Unavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(PeerConnection, "send", lose_answer)
        with pytest.raises(Unavailable):
            here.do("move", id="1")
    assert there.ids() == {1}
    history += [7, *go_on(here, 1, history).token_ids]
    here.do("move", id="1")
    go_on(there, 1, history, **RESUME)


def test_what_waits_in_memory_is_counted(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 200)
    here.do("move", id="1")
    server = there.fleet._server
    assert server is not None
    room = server._server.receiver._room
    assert room._used_bytes > 0
    go_on(there, 1, history, **RESUME)
    until_s = time.monotonic() + 10
    while room._used_bytes and time.monotonic() < until_s:  # a thread drops it
        time.sleep(0.01)
    assert room._used_bytes == 0
    # What is sent ahead and not followed is dropped, sooner or later.
    monkeypatch.setattr(received, "_AHEAD_S", 0.0)
    history = open_session(here, 2, 200)

    def vanish(*_: Any) -> str:
        raise Unavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(PeerConnection, "send", vanish)
        with pytest.raises(Unavailable):
            here.do("move", id="2")
    assert room._used_bytes > 0
    here.do("move", id="2")
    go_on(there, 2, history, **RESUME)
    while room._used_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert room._used_bytes == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/", b"", "INVALID_ARGUMENT"),
        ("POST", "/find", b"[]", "INVALID_ARGUMENT"),
        ("POST", "/find", b'{"id": [1]}', "INVALID_ARGUMENT"),
        ("POST", "/find", b"x" * 200_000, "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", b"", "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", b"\xff" * 5_000_000, "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", (2).to_bytes(8, "little") + b"{}", "INVALID_ARGUMENT"),
        ("PUT", "/sessions/", b"", "INVALID_ARGUMENT"),
        ("PUT", "/sessions/1", b"\x00" * 5_000_000, "INVALID_ARGUMENT"),
    ],
)
def test_what_is_no_session_is_refused(two: list[Server], method: str, path: str, body: bytes, code: str) -> None:
    request = urllib.request.Request(f"http://{two[0].address}{path}", body or None, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert json.loads(caught.value.read())["error"]["code"] == code
    assert two[0].ids() == set()


def test_only_who_has_the_key_is_heard(start_servers: StartServers, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("a secret of the fleet\n")
    here, there = start_servers(2, key_file=str(key_file))
    history = open_session(here, 1)
    here.do("move", id="1")
    go_on(there, 1, history, **RESUME)
    port = int(there.address.rpartition(":")[2])
    for key in ("", "another secret of a fleet"):
        with (
            closing(PeerConnection(("127.0.0.1", port), key, 5.0)) as connection,
            pytest.raises(PermissionDenied, match="peer_key_file"),
        ):
            connection.ask("GET", "/load", [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peer_address": "0.0.0.0:5000"}, "peer_key_file"),
        ({"peer_address": "here"}, "not host:port"),
        ({"peer_address": "127.0.0.1:5000", "peers": "a:b"}, "setting 'peers'"),
        ({"peer_address": "127.0.0.1:5000", "peer_key_file": "/nowhere"}, "cannot be read"),
        ({"peers": "127.0.0.1:5000"}, "needs a peer_address"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Fleet.of(Settings(**settings))


# ---- a server stops ------------------------------------------------------------------------------------------------


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


def test_a_server_that_leaves_is_given_nothing(start_servers: StartServers) -> None:
    here, leaving, third = start_servers(3)
    leaving.driver.engine.call(Maintenance.leave)
    open_session(here, 1)
    assert here.do("move", id="1")["to"] == third.address


def test_a_turn_that_takes_too_long_is_undone_and_its_session_moves(two: list[Server]) -> None:
    here, there = two
    history = open_session(here, 1)
    running = here.driver.ask(1, [7], max_tokens=4000, session_key="ours")
    assert running.begun.wait(10)
    assert drain(here.driver.engine, 0.5, here.fleet.peers) == Drained(saved=1, failed=0, with_kv=1, moved=1)
    assert running.wait().code == "UNAVAILABLE"
    go_on(there, 1, history, **RESUME)


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
    monkeypatch.setattr("microturn.admin.rebalancer._PAUSE_S", 0.05)
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
