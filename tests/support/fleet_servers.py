"""Several servers of one model that know each other: engines on threads of their own, real sockets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from microturn.admin.fleet import Fleet
from microturn.admin.operations import Operations
from microturn.admin.peer_server import route_to
from microturn.engine.maintenance import Maintenance
from microturn.errors import ResourceExhausted
from microturn.serve.child import free_ports
from microturn.settings import Settings
from support.fake_runner import expected_tokens
from support.threads import Answer, Threaded, ThreadedDriver, starting_engines


class Server:
    """One of several servers, which know each other."""

    def __init__(self, driver: Threaded, fleet: Fleet, port: int) -> None:
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


@contextmanager
def starting_servers(make: Callable[..., Threaded] = ThreadedDriver) -> Iterator[StartServers]:
    """Gives what starts servers, so many at once; they end with the block."""
    with starting_engines(make) as start, ExitStack() as stack:

        def start_servers(number: int, *, key_file: str = "", moves: int = 0, **settings: Any) -> list[Server]:
            ports = free_ports(number)
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


def no_room(*_: Any) -> None:
    """In place of `_Room.take`."""
    raise ResourceExhausted("no room")
