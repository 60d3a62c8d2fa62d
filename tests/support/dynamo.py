"""Workers and edges on Dynamo's runtime, each a process of its own, which find each other by files or by etcd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from microturn.serve.child import free_ports
from support import share
from support.scrape import scrape


class Process:
    """``microturn worker`` or ``microturn edge``.

    Attributes:
        address: of its gRPC.
        metrics_port: of a worker.
        said: the lines that it has printed.
    """

    def __init__(self, command: str, *arguments: str, address: str, files: Path) -> None:
        self.address = address
        self.metrics_port = 0
        self.said: list[str] = []
        self._is_ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "microturn.cli", command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DYN_FILE_KV": str(files)},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.said.append(line.rstrip())
                if line.startswith("ready"):
                    self._is_ready.set()
        self._is_ready.set()

    def wait_until_ready(self) -> None:
        assert self._is_ready.wait(120), self.said
        assert any(line.startswith("ready") for line in self.said), self.said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        self._reader.join()


class Cluster:
    """Workers of one model, and edges.

    Args:
        model: its directory.
        directory: where they find each other.
        settings: of each worker.
        etcd: its URL, where they find each other by it.
    """

    def __init__(self, model: Path | str, directory: Path, *settings: str, etcd: str | None = None) -> None:
        self._model = str(model)
        self._files = directory / "discovery"
        self._discovery = [] if etcd is None else [f"--etcd={etcd}"]
        self._settings = [f"--set={setting}" for setting in (f"num_threads={share.num_threads()}", *settings)]
        self._started: list[Process] = []
        self._num_workers = 0

    def start_worker(self, *arguments: str) -> Process:
        grpc_port, peer_port, metrics_port = free_ports(3)
        self._num_workers += 1
        ports = [f"--grpc-port={grpc_port}", f"--peer-port={peer_port}", f"--metrics-port={metrics_port}"]
        named = [f"--model={self._model}", f"--name=worker-{self._num_workers}"]
        worker = self._start("worker", grpc_port, *named, *ports, *self._settings, *arguments)
        worker.metrics_port = metrics_port
        return worker

    def start_edge(self, *arguments: str) -> Process:
        (port,) = free_ports(1)
        return self._start("edge", port, f"--grpc-port={port}", *arguments)

    def _start(self, command: str, port: int, *arguments: str) -> Process:
        process = Process(command, *self._discovery, *arguments, address=f"127.0.0.1:{port}", files=self._files)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.close()


@contextlib.contextmanager
def cluster_of(model: Path | str, directory: Path, *settings: str, etcd: str | None = None) -> Iterator[Cluster]:
    """They end with the block."""
    with contextlib.closing(Cluster(model, directory, *settings, etcd=etcd)) as cluster:
        yield cluster


def wait_for_workers(edge: Process, number: int = 1, timeout_s: float = 30.0) -> None:
    """Until an edge has found so many."""
    deadline_s = time.monotonic() + timeout_s
    while len([line for line in edge.said if "found worker" in line]) < number:
        assert time.monotonic() < deadline_s, edge.said
        time.sleep(0.02)


def num_sessions_on(workers: Iterable[Process]) -> list[int]:
    return [
        int(scrape(f"http://127.0.0.1:{worker.metrics_port}/metrics").sum("microturn_sessions")) for worker in workers
    ]
