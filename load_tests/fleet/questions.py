"""What a question between servers costs who asks and who is asked.

`python -m load_tests.fleet.questions`: the real `Peers` in this process, the real `PeerServer` in another, over the
loopback. It listens on all addresses and is asked by as many of them as there would be servers: 127.0.0.1, 127.0.0.2
and so on. Its engine is a thread that does what is posted and has no model: a step that runs would make an answer wait.
A real engine between its steps, over a model that is a hash, made it 0.6 ms of a core for who is asked. The same for
the question that Dynamo's edges and workers ask, where its runtime is installed.

Seconds of a core are those of a whole process, by question; what the kernel does on its behalf is in it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil

from load_tests.bench.results import print_table, write_result
from microturn.admin.peer_server import PeerServer
from microturn.admin.peers import Peers
from microturn.engine.moving import Load
from microturn.hosts.dynamo.runtime import run_on_loop, start_runtime
from microturn.serve.child import free_ports

_KEY = "0123456789abcdef01234567"
_NUM_QUESTIONS = 4000
_ENDPOINT = "fleetquestions.worker.control"
_LOAD = Load(126, 180, False, 10**10, 10**6, 10)


class _Engine:
    """Does what is posted, between steps that it has none of."""

    environment = SimpleNamespace(model_fingerprint="a model", pool=SimpleNamespace(num_pages=0))
    runner = SimpleNamespace(kv=SimpleNamespace(page_parts=(), loads_any_image=True, bytes_per_page=0))

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, task: Callable[[Any], Any]) -> Any:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sessions = SimpleNamespace(load=_LOAD, epoch_of=lambda *_: None)
        self._inbox.put(lambda: done.put(task(sessions)))
        return done.get()

    def _run(self) -> None:
        while True:
            self._inbox.get()()


def _serve_peers(port: int) -> None:
    engine: Any = _Engine()
    peers = Peers(list, _KEY, "asked", port)
    PeerServer(("0.0.0.0", port), _KEY, "asked", "a route", engine, peers)
    print("ready", flush=True)
    threading.Event().wait()


async def _serve_dynamo() -> None:
    async def control(*_: Any) -> Any:
        yield {"num_sessions": 126, "max_sessions": 180, "is_leaving": False, "name": "w-0", "late_share": 0.0}

    endpoint = start_runtime("127.0.0.1").endpoint(_ENDPOINT)
    print("ready", flush=True)
    await endpoint.serve_endpoint(control)


@contextmanager
def _asked(*arguments: str) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "load_tests.fleet.questions", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield psutil.Process(process.pid)
        finally:
            process.kill()


class _Costs:
    """Of questions, from its making on."""

    def __init__(self, asked: psutil.Process) -> None:
        self._processes = (psutil.Process(), asked)
        self._begun = self._spent()

    def _spent(self) -> list[float]:
        return [time.monotonic(), *(sum(process.cpu_times()[:2]) for process in self._processes)]

    def of(self, what: str, at_once: int, num: int) -> dict[str, object]:
        each = [1e6 * (now - then) / num for now, then in zip(self._spent(), self._begun, strict=True)]
        names = ("wall_us", "asker_core_us", "asked_core_us")
        return {"question": what, "servers": at_once, **{k: round(v) for k, v in zip(names, each, strict=True)}}


def _ask_peers() -> Iterator[dict[str, object]]:
    (port,) = free_ports(1)
    request: Any = SimpleNamespace(session_id="of-nobody-here", options={"session_key": "k" * 16, "tenant": "t"})
    with _asked("peers", str(port)) as asked:
        for num_servers in (1, 32, 128, 250):
            addresses = [(f"127.0.0.{number + 1}", port) for number in range(num_servers)]
            peers = Peers(partial(list, addresses), _KEY, "asker", port)
            assert len(peers.others("a model")) == num_servers
            questions = (("find", partial(peers.fetch, request)), ("load", partial(peers.others, "a model")))
            for what, ask in questions:
                costs, num = _Costs(asked), -(-_NUM_QUESTIONS // num_servers)
                for _ in range(num):
                    ask()
                yield costs.of(what, num_servers, num * num_servers)
            peers.close()


async def _ask_dynamo() -> list[dict[str, object]]:
    with TemporaryDirectory() as files:
        os.environ["DYN_FILE_KV"] = files
        with _asked("dynamo") as asked:
            runtime: Any = start_runtime("127.0.0.1")
            client = await runtime.endpoint(_ENDPOINT).client()
            await client.wait_for_instances()
            (instance,) = client.instance_ids()

            async def ask() -> None:
                async for _ in await client.direct({"op": "load"}, instance):
                    pass

            async def ask_all(num: int) -> None:
                asking: list[Awaitable[None]] = [asyncio.wait_for(ask(), 1.5) for _ in range(num)]
                await asyncio.gather(*asking)

            await ask_all(32)
            told = []
            for at_once in (1, 32):
                costs = _Costs(asked)
                for _ in range(_NUM_QUESTIONS // at_once):
                    await ask_all(at_once)
                told.append(costs.of("control, Dynamo", at_once, _NUM_QUESTIONS))
            return told


def main() -> None:
    """Asks, prints a table and writes a JSON file."""
    rows = list(_ask_peers())
    if importlib.util.find_spec("dynamo") is not None:
        rows += run_on_loop(_ask_dynamo())
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print("written:", write_result("fleet-questions", {"protocol": __doc__, "by_question": rows}), flush=True)
    os._exit(0)  # Dynamo's runtime says at an orderly exit that its loop has gone


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["peers", port]:
            _serve_peers(int(port))
        case ["dynamo"]:
            run_on_loop(_serve_dynamo())
        case _:
            main()
