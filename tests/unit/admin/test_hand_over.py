"""Tests of admin.hand_over: sessions move from one server to another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from microturn.admin import hand_over, received
from microturn.admin.peer_connection import PeerConnection
from microturn.engine.maintenance import Maintenance
from microturn.errors import (
    FailedPrecondition,
    InvalidArgument,
    MicroturnError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState
from microturn.offload.tiers import Tiers
from microturn.serve.child import free_ports
from support.fake_runner import expected_tokens
from support.fleet_servers import Server, StartServers, go_on, no_room, open_session
from support.snapshots import RESUME
from support.threads import Answer
from support.tiers import make_kv


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

    def note(self: PeerConnection, snapshot: Any, kv: Any, *args: Any, **kwargs: Any) -> str | None:
        sent.append(kv.pages.num_pages)
        return send(self, snapshot, kv, *args, **kwargs)

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

    def send_late(self: PeerConnection, *args: Any, **kwargs: Any) -> str | None:
        waiting.append(here.driver.ask(1, [7], max_tokens=3, session_key="ours"))
        here.driver.engine.call(lambda _: None)  # it has arrived
        assert not waiting[0].ended.is_set()
        return send(self, *args, **kwargs)

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
        assert stranger.code in ("NOT_FOUND", "PERMISSION_DENIED")
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
    here.driver.ask(1, [], end=True, on_overlap="interrupt", session_key="ours").wait()
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
        ({"to": f"127.0.0.1:{free_ports(1)[0]}"}, Unavailable),  # nobody listens
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
    monkeypatch.setattr(Tiers, "_begin_to_load", lambda *_: False)
    here, there = start_servers(2)
    history = open_session(here, 1)
    open_session(here, 2)
    here.do("move", id="1")
    with pytest.raises(ResourceExhausted, match="bytes of KV wait here"):
        here.do("move", id="2")
    go_on(there, 1, history, **RESUME)


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server takes a session, and is not heard to."""
    send = PeerConnection.send

    def send_in_vain(self: PeerConnection, *args: Any, **kwargs: Any) -> str | None:
        send(self, *args, **kwargs)
        raise Unavailable("no answer")

    monkeypatch.setattr(PeerConnection, "send", send_in_vain)


def test_a_copy_that_was_left_behind_gives_way(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server took the session, and its answer was lost: the session goes on here, and moves later."""
    here, there = two
    history = open_session(here, 1)

    def cannot(*_: Any) -> None:
        raise Unavailable("no answer")

    with monkeypatch.context() as patch:
        lose_answers(patch)
        patch.setattr(PeerConnection, "drop", cannot)
        with pytest.raises(Unavailable):
            here.do("move", id="1")
    assert there.ids() == {1}
    history += [7, *go_on(here, 1, history).token_ids]
    # It takes the place of nothing that is newer.
    with pytest.raises(FailedPrecondition, match="out of date"):
        there.do("move", id="1", to=here.address)
    here.do("move", id="1")
    go_on(there, 1, history, **RESUME)


def test_what_another_server_may_have_is_dropped_there(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = two
    history = open_session(here, 1)
    lose_answers(monkeypatch)
    with pytest.raises(Unavailable):
        here.do("move", id="1")
    assert there.ids() == set()
    go_on(here, 1, history)


def test_one_that_has_had_a_turn_there_goes_on_there(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn was answered, and undone as the session was dropped."""
    here, there = two
    history = open_session(here, 1)
    send = PeerConnection.send

    def answer_and_lose(self: PeerConnection, *args: Any, **kwargs: Any) -> str | None:
        send(self, *args, **kwargs)
        history.extend([7, *go_on(there, 1, history, **RESUME).token_ids])
        raise Unavailable("no answer")

    monkeypatch.setattr(PeerConnection, "send", answer_and_lose)
    here.do("move", id="1", to=there.address)
    assert (here.ids(), there.ids()) == (set(), {1})
    late = here.driver.ask(1, [7], max_tokens=3, session_key="ours").wait()
    assert str(late.error).endswith(f"[route={there.route}]")
    go_on(there, 1, history)


@pytest.mark.parametrize("how", ["END that is refused", "START again"])
def test_a_session_that_ends_while_it_is_sent_lives_nowhere_else(
    two: list[Server], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    here, there = two
    open_session(here, 1)
    send = PeerConnection.send

    def end_meanwhile(self: PeerConnection, *args: Any, **kwargs: Any) -> str | None:
        if how == "START again":
            here.driver.ask(1, [5], start=True, max_tokens=1, session_key="ours").wait()
        else:
            assert here.driver.ask(1, [], end=True, turn=77, session_key="ours").wait().code == "FAILED_PRECONDITION"
        return send(self, *args, **kwargs)

    monkeypatch.setattr(PeerConnection, "send", end_meanwhile)
    with pytest.raises(NotFound):
        here.do("move", id="1")
    assert there.ids() == set()
    assert here.ids() == ({1} if how == "START again" else set())


def test_a_session_of_another_client_stays(two: list[Server]) -> None:
    """Clients choose ids."""
    here, there = two
    history = open_session(here, 1)
    there.driver.ask(1, [5, 6], start=True, max_tokens=2, session_key="another").wait()
    with pytest.raises(FailedPrecondition, match="is live here"):
        here.do("move", id="1", to=there.address)
    go_on(here, 1, history)
    assert there.driver.ask(1, [5], max_tokens=2, session_key="another").wait().error is None


def test_a_session_with_a_paused_turn_moves_and_does_it_again(two: list[Server]) -> None:
    here, there = two
    history = open_session(here, 1)
    turn = here.driver.ask(1, [7], max_tokens=4000, session_key="ours", turn=1)
    assert turn.begun.wait(10)
    here.driver.cancel_all(1)
    assert here.driver.engine.call(Maintenance.describe)[0]["state"] == "parked"
    here.do("move", id="1")
    go_on(there, 1, history, turn=1, **RESUME)


def test_a_session_whose_kv_is_all_that_fits_is_sent_ahead(start_servers: StartServers) -> None:
    here, there = start_servers(2, num_pages=600, max_context=2000)
    history = open_session(here, 1, 1900)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over, "_AHEAD_BYTES", 0)
        here.do("move", id="1")
    go_on(there, 1, history, **RESUME)


def place_of_kv(server: Server) -> str:
    (session,) = server.driver.engine.call(Maintenance.describe)
    return session["kv"]


def test_kv_that_arrives_is_loaded_before_the_next_turn(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn for which it was loaded took 125 ms more for 92 MB."""
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 3000)
    here.do("move", id="1")
    until_s = time.monotonic() + 10
    while place_of_kv(there) != "device":
        assert time.monotonic() < until_s, place_of_kv(there)
        time.sleep(0.01)
    answer = go_on(there, 1, history, **RESUME)
    assert answer.status.usage["computed_tokens"] == 4
    assert answer.status.timing_ms.get("restore", 0.0) == 0.0


def test_kv_that_arrives_waits_where_few_pages_are_free(start_servers: StartServers) -> None:
    """What is loaded and evicted before its turn would be lost here, where there is no other tier."""
    here, there = start_servers(2, num_pages=600, max_context=2000)
    history = open_session(here, 1, 1900)
    open_session(there, 2, 300)
    here.do("move", id="1")
    time.sleep(0.1)
    assert {session["kv"] for session in there.driver.engine.call(Maintenance.describe)} == {"device", "host"}
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == 4


def test_a_session_that_grows_much_while_it_is_sent_moves(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows what was sent ahead has no room in the same image."""
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 100)
    send_ahead = PeerConnection.send_ahead

    def grow(self: PeerConnection, kv: Any) -> str:
        transfer = send_ahead(self, kv)
        answer = here.driver.ask(1, [9] * 900, max_tokens=2, session_key="ours").wait()
        history.extend([*[9] * 900, *answer.token_ids])
        return transfer

    monkeypatch.setattr(PeerConnection, "send_ahead", grow)
    here.do("move", id="1")
    assert go_on(there, 1, history, **RESUME).status.usage["computed_tokens"] == 4


def test_kv_that_was_dropped_cannot_be_read() -> None:
    room = received._Room(100)
    kv = make_kv(4)
    source = received.ReceivedKV(TableState(4, 8), kv.read([1, 2]), 100, room, is_loadable=False)
    source.read(KVImage(kv.page_parts, 2))
    source.drop()
    source.drop()
    with pytest.raises(OSError, match="in use"):
        source.read(KVImage(kv.page_parts, 2))


def test_a_branch_of_a_session_that_was_moved_is_told_the_way(two: list[Server]) -> None:
    here, there = two
    open_session(here, 1)
    here.do("move", id="1")
    answer = here.driver.ask(2, [7], start=True, max_tokens=3, session_key="ours", fork_of="1").wait()
    assert str(answer.error).endswith(f"[route={there.route}]")


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """Its engine answers nobody."""
    goes_on = threading.Event()
    waiting = threading.Thread(target=lambda: server.driver.engine.call(lambda _: goes_on.wait(10)))
    waiting.start()
    try:
        yield
    finally:
        goes_on.set()
        waiting.join()


def test_a_server_that_is_silent_is_not_one_without_the_session(
    two: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two
    history = open_session(here, 1)
    monkeypatch.setattr("microturn.admin.peers._QUESTION_S", 0.2)
    monkeypatch.setattr("microturn.admin.peers._DEAD_S", 1.0)
    with standing_still(here):
        assert there.driver.ask(1, [7], session_key="ours", **RESUME).wait().code == "UNAVAILABLE"
        time.sleep(1.1)  # by now it is dead
        assert there.driver.ask(1, [7], session_key="ours", **RESUME).wait().code == "NOT_FOUND"
    monkeypatch.setattr("microturn.admin.peers._FORGIVEN_S", 0.0)
    go_on(there, 1, history, **RESUME)


def test_a_server_that_was_silent_for_a_moment_is_asked_again(
    two: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for dead a little later, and its sessions for gone."""
    here, there = two
    history = open_session(here, 1)
    monkeypatch.setattr("microturn.admin.peers._DEAD_S", 0.5)
    with standing_still(here):
        assert there.driver.ask(2, [7], session_key="ours", **RESUME).wait().code == "UNAVAILABLE"
    time.sleep(0.6)
    go_on(there, 1, history, **RESUME)


def test_where_names_cannot_be_resolved_a_session_may_live(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = two
    history = open_session(here, 1)
    for errno, code in ((socket.EAI_AGAIN, "UNAVAILABLE"), (socket.EAI_NONAME, "NOT_FOUND")):

        def fail(*_: Any, errno: int = errno, **__: Any) -> None:
            raise socket.gaierror(errno, "no address")

        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", fail)
            answer = there.driver.ask(1, [7], session_key="ours", **RESUME).wait()
        assert answer.code == code
        assert ("retry_after_ms" in str(answer.error)) == (code == "UNAVAILABLE")
    go_on(there, 1, history, **RESUME)


def test_what_waits_in_memory_is_counted(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    history = open_session(here, 1, 200)
    server = there.fleet._server
    assert server is not None
    room = server._server.receiver._room
    with monkeypatch.context() as patch:
        patch.setattr(Tiers, "_begin_to_load", lambda *_: False)
        here.do("move", id="1")
    assert room._used_bytes > 0
    go_on(there, 1, history, **RESUME)
    until_s = time.monotonic() + 10
    while room._used_bytes and time.monotonic() < until_s:  # a thread drops it
        time.sleep(0.01)
    assert room._used_bytes == 0
    # What is sent ahead and not followed is dropped, sooner or later.
    history = open_session(here, 2, 200)

    def vanish(*_: Any, **__: Any) -> str:
        raise Unavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(PeerConnection, "send", vanish)
        with pytest.raises(Unavailable):
            here.do("move", id="2")
    assert room._used_bytes > 0
    monkeypatch.setattr(received, "_AHEAD_S", 0.0)
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 1 << 40)
    here.do("move", id="2")
    go_on(there, 2, history, **RESUME)
    until_s = time.monotonic() + 10
    while room._used_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert room._used_bytes == 0
