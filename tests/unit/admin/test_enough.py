"""Tests of admin.received as servers are evened out: who gets sessions has the last word on how many are enough."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microturn.admin import hand_over
from microturn.admin.hand_over import send_to_peer
from microturn.admin.peer_address import read_address
from microturn.admin.peer_connection import PeerConnection
from microturn.admin.rebalancer import Rebalancer
from microturn.admin.received import Receiver
from microturn.errors import ResourceExhausted
from support.fleet_servers import Server, StartServers, go_on, open_session
from support.snapshots import RESUME


def receiver_of(server: Server) -> Receiver:
    assert server.fleet._server is not None
    return server.fleet._server.receiver


def num_said(server: Server, asker: Server) -> int:
    (said,) = asker.fleet.peers.others(server.driver.engine.environment.model_fingerprint)
    return said.num_sessions


def send(here: Server, session_id: int, there: Server, enough: int) -> None:
    with here.fleet.peers.connect(read_address(there.address), enough) as connection:
        assert send_to_peer(here.driver.engine, session_id, connection) is not None


@pytest.mark.parametrize("is_sent_ahead", [False, True])
def test_no_more_are_taken_than_are_enough(
    two: list[Server], monkeypatch: pytest.MonkeyPatch, is_sent_ahead: bool
) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0 if is_sent_ahead else 1 << 40)
    here, there = two
    histories = {number: open_session(here, number) for number in (1, 2, 3)}
    for number in (1, 2):
        send(here, number, there, 2)
    with pytest.raises(ResourceExhausted, match="as many sessions as this one should have"):
        send(here, 3, there, 2)
    assert (here.ids(), there.ids()) == ({3}, {1, 2})
    assert num_said(there, here) == 2
    go_on(here, 3, histories[3])
    go_on(there, 1, histories[1], **RESUME)


def test_one_whose_kv_comes_counts(two: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    open_session(here, 1)
    open_session(here, 2)
    send_ahead = PeerConnection.send_ahead

    def meanwhile(self: PeerConnection, kv: Any) -> str:
        transfer = send_ahead(self, kv)
        monkeypatch.setattr(PeerConnection, "send_ahead", send_ahead)
        assert (there.ids(), num_said(there, here)) == (set(), 1)
        with pytest.raises(ResourceExhausted):
            send(here, 2, there, 1)
        return transfer

    monkeypatch.setattr(PeerConnection, "send_ahead", meanwhile)
    send(here, 1, there, 1)
    assert (there.ids(), num_said(there, here)) == ({1}, 1)


@pytest.mark.parametrize("what", ["is not KV", "has not followed"])
def test_one_that_does_not_come_counts_no_more(two: list[Server], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    here, there = two
    open_session(here, 1)
    send_ahead = PeerConnection.send_ahead

    def fail(self: PeerConnection, kv: Any) -> str:
        if what == "is not KV":
            self.ask("PUT", "/kv/name", [b"nothing"])
        send_ahead(self, kv)
        raise ResourceExhausted("what was sent is not followed")

    monkeypatch.setattr(PeerConnection, "send_ahead", fail)
    with pytest.raises(Exception, match="not"):
        send(here, 1, there, 1)
    receiver = receiver_of(there)
    assert receiver.num_coming == bool(receiver._room._used_bytes) == (what == "has not followed")
    monkeypatch.setattr("microturn.admin.received._AHEAD_S", 0.0)
    until_s = time.monotonic() + 10
    while receiver.num_coming or receiver._room._used_bytes:  # nothing else comes
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_one_that_has_just_come_is_not_moved_again(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, second, third = start_servers(3)
    for number in range(4):
        open_session(here, number)
        send(here, number, second, 100)
    assert receiver_of(second).came_lately() == {0, 1, 2, 3}
    rebalancer = Rebalancer(second.driver.engine, second.fleet.peers, receiver_of(second), 60)
    assert rebalancer.look() == 2.0
    assert second.ids() == {0, 1, 2, 3}
    monkeypatch.setattr("microturn.admin.received._STAYS_S", 0.0)
    assert rebalancer.look() == 1.0
    assert len(second.ids()) == 3
    assert len(here.ids() | third.ids()) == 1
