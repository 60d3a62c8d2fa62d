"""This server among others of its model: where it takes their sessions, and how it gives them its own."""

from __future__ import annotations

import secrets
from typing import Self

from microturn.admin.peer_address import Address, read_address
from microturn.admin.peer_server import PeerServer, route_to
from microturn.admin.peers import FindServers, Peers, by_name
from microturn.admin.rebalancer import Rebalancer
from microturn.engine.engine import Engine
from microturn.errors import InvalidArgument
from microturn.settings import Settings, read_secret

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Fleet:
    """What a server has to do with the others.

    Attributes:
        peers: the other servers.

    Args:
        settings: of this server, with a `peer_address`.
        find: the other servers; None finds them by the setting `peers`.
        route: what `x-session-route` says of this server; None is by the setting `edge_address`, if it is set.

    Raises:
        InvalidArgument: they do not go together, or the key cannot be read.
    """

    def __init__(self, settings: Settings, find: FindServers | None = None, route: str | None = None) -> None:
        self._settings = settings
        self._route = route or route_to(settings.edge_address)
        self._instance = secrets.token_hex(8)
        self._address = _address("peer_address", settings.peer_address)
        self._key = read_secret("peer_key_file", settings.peer_key_file)
        if not self._key and self._address[0] not in _LOOPBACK:
            raise InvalidArgument(
                f"peer_address {settings.peer_address} can be reached from other machines: name a peer_key_file, "
                "with a secret that all servers share"
            )
        named = [_address("peers", one) for one in settings.peers.split(",") if one.strip()]
        self.peers = Peers(find or by_name(named), self._key, self._instance, self._address[1])
        self._server: PeerServer | None = None
        self._rebalancer: Rebalancer | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """The fleet that settings name; None if this server is alone.

        Raises:
            InvalidArgument: as `Fleet`.
        """
        if settings.peer_address:
            return cls(settings)
        if settings.peers:
            raise InvalidArgument(
                "setting 'peers' needs a peer_address (--peer-port), where this server takes sessions"
            )
        return None

    def join(self, engine: Engine) -> None:
        """Takes sessions for an engine from now on, and evens them out.

        Raises:
            InvalidArgument: the port is in use.
        """
        self._server = PeerServer(self._address, self._key, self._instance, self._route, engine, self.peers)
        if self._settings.moves_per_minute and self._route is not None:
            moves_per_minute = self._settings.moves_per_minute
            self._rebalancer = Rebalancer(engine, self.peers, self._server.receiver, moves_per_minute)
            self._rebalancer.start()

    def stop_rebalancing(self) -> None:
        """Evens out nothing any more."""
        if self._rebalancer is not None:
            self._rebalancer.close()

    def leave(self) -> None:
        """Takes and gives no more."""
        self.stop_rebalancing()
        if self._server is not None:
            self._server.close()
        self.peers.close()


def _address(setting: str, text: str) -> Address:
    try:
        return read_address(text)
    except ValueError as error:
        raise InvalidArgument(f"setting '{setting}': {error}") from error
