"""What an edge adds to a turn on a worker, beside Envoy in front of Triton.

The same model on both hosts, each with one session on each way to it: the worker's own gRPC port, an edge, Triton's
port, and Envoy, which here only passes on: no TLS, tokens or limits, as the edge has none. Turn by turn in alternation,
in one run; no two turns at once. Figures, milliseconds:

* `around the engine`: wall time at the client less the engine's own `timing_ms.total` of the same turn, which has eight
  tokens that come one by one.
* `first token`: the same of the first token, less the engine's time before it.
* `keep-alive`: wall time of a turn that computes nothing: the whole way there and back.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from tqdm import tqdm

from load_tests.bench.results import percentile, print_table, write_result
from microturn.serve.child import free_ports, running_server
from microturn_client import AsyncClient, AsyncSession, Tokens, TurnEnd

NUM_INPUT, NUM_OUTPUT = 16, 8
_READY_S = 120.0

Samples = dict[str, dict[str, list[float]]]


def run_edge_cost(model: str, num_turns: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_turns: of each way.
    """
    with TemporaryDirectory() as directory, ExitStack() as stack:
        triton = stack.enter_context(running_server(model))
        worker, edge, envoy = (f"127.0.0.1:{port}" for port in free_ports(3))
        files = {"DYN_FILE_KV": str(Path(directory) / "discovery")}
        peer_port, metrics_port = free_ports(2)
        ports = ["--grpc-port", worker.rpartition(":")[2], "--peer-port", str(peer_port)]
        ports += ["--metrics-port", str(metrics_port)]
        stack.enter_context(_running("worker", "--model", model, *ports, environment=files))
        stack.enter_context(_running("edge", "--grpc-port", edge.rpartition(":")[2], environment=files))
        stack.enter_context(_envoy(Path(directory), envoy, triton))
        time.sleep(1)  # the edge finds the worker
        ways = {"worker": worker, "edge, worker": edge, "Triton": triton, "Envoy, Triton": envoy}
        samples = asyncio.run(_measure(ways, num_turns))
    rows: list[Sequence[object]] = []
    for figure, of_way in samples.items():
        rows += [
            [figure, way, *(percentile(ms[1:], percent) for percent in (50, 90, 99))] for way, ms in of_way.items()
        ]
        for front, alone in (("edge, worker", "worker"), ("Envoy, Triton", "Triton")):
            added = percentile(of_way[front][1:], 50) - percentile(of_way[alone][1:], 50)
            rows.append([figure, f"{front.partition(',')[0]} adds", added, "", ""])
    print(f"\none session on each way, {NUM_INPUT} tokens in, {NUM_OUTPUT} out, {num_turns} turns; ms")
    print_table(["", "", "p50", "p90", "p99"], rows)
    result = {"protocol": __doc__, "model": model, "num_turns": num_turns, "ms": samples}
    print("written:", write_result("edge", result))


async def _measure(ways: Mapping[str, str], num_turns: int) -> Samples:
    samples: Samples = defaultdict(lambda: defaultdict(list))
    clients = {way: AsyncClient(address, timeout_s=60) for way, address in ways.items()}
    try:
        sessions = {way: client.session(idle_timeout_s=600) for way, client in clients.items()}
        for number in tqdm(range(num_turns), desc="turns", unit="turn", leave=False):
            given = random.Random(number).choices(range(1000, 40_000), k=NUM_INPUT)
            for way, session in sessions.items():
                for figure, took_ms in (await _turn(session, given)).items():
                    samples[figure][way].append(took_ms)
        for session in sessions.values():
            await session.close()
    finally:
        for client in clients.values():
            await client.close()
    return samples


async def _turn(session: AsyncSession, given: list[int]) -> dict[str, float]:
    """One turn, and one that computes nothing."""
    begun_s, first_s = time.perf_counter(), 0.0
    async for event in session.turn(given, max_tokens=NUM_OUTPUT, ignore_eos=True):
        if isinstance(event, Tokens) and not first_s:
            first_s = time.perf_counter() - begun_s
        if isinstance(event, TurnEnd):
            timing = event.status.timing_ms
    wall_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    await session.turn(None, max_tokens=0).wait()
    return {
        "around the engine": wall_s * 1e3 - timing.total,
        "first token": first_s * 1e3 - timing.queue - timing.prefill,
        "keep-alive": (time.perf_counter() - begun_s) * 1e3,
    }


@contextmanager
def _running(command: str, *arguments: str, environment: Mapping[str, str]) -> Iterator[None]:
    program = [sys.executable, "-m", "microturn.cli", command, *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline().startswith("ready"):
                raise RuntimeError(f"microturn {command} did not start")
            yield
        finally:
            process.terminate()


@contextmanager
def _envoy(directory: Path, address: str, upstream: str) -> Iterator[None]:
    """The real Envoy (`make deploy-tools`), which passes streams on."""
    config = directory / "envoy.yaml"
    config.write_text(yaml.safe_dump(_envoy_config(address, upstream)))
    program = [str(Path(sys.executable).parent / "envoy"), "--config-path", str(config), "--use-dynamic-base-id"]
    with subprocess.Popen([*program, "--concurrency", "1", "--log-level", "error"]) as process:
        try:
            yield
        finally:
            process.terminate()


def _envoy_config(address: str, upstream: str) -> dict[str, object]:
    def at(place: str) -> dict[str, object]:
        host, _, port = place.rpartition(":")
        return {"socket_address": {"address": host, "port_value": int(port)}}

    types = "type.googleapis.com/envoy.extensions"
    router = {"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "triton", "timeout": "0s"}}]
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "sessions",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{types}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": at(upstream)}}]}]
    cluster = {
        "name": "triton",
        "typed_extension_protocol_options": http2,
        "load_assignment": {"cluster_name": "triton", "endpoints": endpoints},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "sessions", "address": at(address), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
