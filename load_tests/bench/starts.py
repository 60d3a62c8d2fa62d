"""How long a server takes to start, and to serve again when its model process was killed.

`microturn serve` is started on a warm cache (weights, compiled kernels, remembered checks). Figures, in seconds:

* `ready`: from the program's start until it says so.
* `first token`: from the program's start until a client has the first token of its first turn.
* `serving again`: from SIGKILL of the model process until the health service says SERVING again.
* `token again`: from SIGKILL until a new client has the first token of its turn.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tqdm import tqdm

from load_tests.bench.results import percentile, print_table, write_result
from microturn.serve.child import RunningServer, free_ports, started_server
from microturn.serve.process_tree import find_descendants
from microturn.serve.triton_server import STUB_NAME
from microturn_client import Client

_POLL_S = 0.01
_MOST_S = 120.0


def run_starts(model: str, num_runs: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_runs: starts that count; one more before them warms the cache.
    """
    runs: dict[str, list[float]] = defaultdict(list)
    for number in tqdm(range(num_runs + 1), desc="starts", leave=False):
        for name, seconds in _start_and_kill(model).items():
            if number > 0:
                runs[name].append(seconds)
    rows = [[name, percentile(of, 50), max(of)] for name, of in runs.items()]
    print_table(["s", f"median of {num_runs}", "longest"], rows)
    print("written:", write_result("starts", {"protocol": __doc__, "model": model, "s": runs}))


def _start_and_kill(model: str) -> dict[str, float]:
    seconds = {}
    (port,) = free_ports(1)
    begun_s = time.perf_counter()
    with (
        started_server(model, arguments=["--health-port", str(port)], log_path=Path(os.devnull)) as server,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        seconds["ready"] = time.perf_counter() - begun_s
        _generate_token(server.address)
        seconds["first token"] = time.perf_counter() - begun_s
        health = health_pb2_grpc.HealthStub(channel)
        _wait_for(health, health_pb2.HealthCheckResponse.SERVING)
        killed_s = time.perf_counter()
        _kill_model_process(server)
        _wait_for(health, health_pb2.HealthCheckResponse.NOT_SERVING)
        _wait_for(health, health_pb2.HealthCheckResponse.SERVING)
        seconds["serving again"] = time.perf_counter() - killed_s
        _generate_token(server.address)
        seconds["token again"] = time.perf_counter() - killed_s
    return seconds


def _generate_token(address: str) -> None:
    with Client(address) as client, client.session() as session:
        session.turn("Once upon a time", max_tokens=1, ignore_eos=True).wait()


def _kill_model_process(server: RunningServer) -> None:
    (process,) = find_descendants(server.pid, STUB_NAME)
    process.kill()


def _wait_for(health: health_pb2_grpc.HealthStub, wanted: int) -> None:
    deadline_s = time.perf_counter() + _MOST_S
    while health.Check(health_pb2.HealthCheckRequest()).status != wanted:
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"the server was not {wanted} within {_MOST_S:.0f} s")
        time.sleep(_POLL_S)
