"""Tests of admin.hand_over: sessions move from one server to another."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microturn.admin import hand_over, received
from microturn.admin.peers import PeerConnection
from microturn.engine.maintenance import Maintenance
from microturn.errors import InvalidArgument, MicroturnError, NotFound, ResourceExhausted, Unavailable
from microturn.serve.child import free_ports
from support.fake_runner import expected_tokens
from support.fleet_servers import Server, StartServers, go_on, no_room, open_session
from support.snapshots import RESUME
from support.threads import Answer


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
