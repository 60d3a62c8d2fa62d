"""How long a session's turn waits while the session moves to another server with its KV.

Two servers of the model; one session with a context of some length says something every half second. By the way it is
moved to the other server, to and fro. A turn comes at a random time of a move: it is answered where the session was, or
told that it moved and said again there, on a stream that is opened for it. No proxy is between. Figures:

* `turn alone`: seconds of such a turn while nothing moves, on a stream that is opened for it.
* `turn in a move`: the same, while the session moves; where it has moved, the turn loads the KV that came with it.
* `move`: seconds of the whole move, as the admin socket answers.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from load_tests.bench.results import percentile, print_table, write_result
from microturn.admin.client import ask
from microturn.serve.child import free_ports, started_server
from microturn_client import Client, NotFound, Unavailable

CONTEXT_LENS = (1000, 4000, 7500)
NUM_ROUNDS = 30
_PAUSE_S = 0.5
_PATIENCE_S = 60.0
_KEY = "the benchmark's"


@dataclass(frozen=True)
class _Server:
    client: Client
    admin: Path
    peer: str


def run_hand_over(model: str) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
    """
    with TemporaryDirectory() as directory, ExitStack() as stack:
        ports = free_ports(2)
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        servers = []
        for port in ports:
            admin = Path(directory) / f"{port}.sock"
            running = stack.enter_context(
                started_server(
                    model,
                    f"peers={peers}",
                    "moves_per_minute=0",
                    arguments=["--peer-port", str(port), "--admin-socket", str(admin)],
                    log_path=Path(os.devnull),
                )
            )
            client = stack.enter_context(Client(running.address, recovery=None))
            servers.append(_Server(client, admin, f"127.0.0.1:{port}"))
        results = [_measure(servers, length) for length in CONTEXT_LENS]
    print_table(
        ["tokens", "KV, MB", "turn alone, ms", "turn in a move, ms", "longest", "move, ms", "MB/s"],
        [
            [
                result["context_len"],
                result["kv_bytes"] / 1e6,
                *(1e3 * percentile(result[name], 50) for name in ("turn alone", "turn in a move")),
                1e3 * max(result["turn in a move"]),
                1e3 * percentile(result["move"], 50),
                result["kv_bytes"] / 1e6 / percentile(result["move"], 50),
            ]
            for result in results
        ],
    )
    print("written:", write_result("hand-over", {"protocol": __doc__, "model": model, "contexts": results}))


def _measure(servers: list[_Server], context_len: int) -> dict[str, Any]:
    here, there = servers
    name = f"of {context_len} tokens"
    with here.client.session(session_id=name, session_key=_KEY, idle_timeout_s=600) as session:
        session.append(random.Random(context_len).choices(range(1000, 20000), k=context_len))
        alone: list[float] = []
        moving: list[float] = []
        moves: list[float] = []
        (described,) = [one for one in ask(here.admin, "list", _PATIENCE_S) if one["id"] == name]
        for _ in tqdm(range(NUM_ROUNDS), desc=f"{context_len} tokens", leave=False):
            time.sleep(_PAUSE_S)
            _turn_s([here], name)  # loads the KV that came with the last move
            alone.append(_turn_s([here], name))
            time.sleep(_PAUSE_S)
            took: list[float] = []
            move = threading.Thread(target=_move, args=(here, there, name, took))
            move.start()
            time.sleep(random.random() * (moves[-1] if moves else 0.1))
            moving.append(_turn_s([here, there], name))
            move.join()
            moves += took
            here, there = there, here
        with here.client.session(session_id=name, session_key=_KEY, resume=True):
            pass
    lengths = {"context_len": context_len, "kv_bytes": described["bytes"]["device"]}
    return {**lengths, "turn alone": alone, "turn in a move": moving, "move": moves}


def _move(here: _Server, there: _Server, name: str, took: list[float]) -> None:
    begun_s = time.perf_counter()
    ask(here.admin, "move", _PATIENCE_S, id=name, to=there.peer)
    took.append(time.perf_counter() - begun_s)


def _turn_s(servers: list[_Server], name: str) -> float:
    """Seconds of a turn of a session that is on the first of these servers, or moves to the second."""
    begun_s = time.perf_counter()
    for server in servers:
        session = server.client.session(session_id=name, session_key=_KEY, resume=True)
        try:
            session.turn([1234], max_tokens=1, ignore_eos=True).wait()
        except (Unavailable, NotFound):
            continue
        return time.perf_counter() - begun_s
    raise RuntimeError(f"session '{name}' is on none of the servers")
