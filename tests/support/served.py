"""``microturn serve`` as a process of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn.serve.child import free_ports
from microturn.serve.options import default_model_repository
from microturn.serve.process_tree import find_descendants
from microturn.serve.triton_server import STUB_NAME
from support import share
from support.processes import alive_after, kill_all

SHARED_MEMORY = Path("/dev/shm")
_LIGHT_REPOSITORY = Path(__file__).parents[1] / "e2e" / "serve" / "light_repository"


# Starts a server, with further options of ``microturn serve``; it is not yet ready.
Start = Callable[..., "Served"]


@contextlib.contextmanager
def servers_of(model: str | Path, new_run_dir: Callable[[], Path], **settings: object) -> Iterator[Start]:
    """Yields what starts servers of a model, with these settings; they end with the block."""
    with contextlib.ExitStack() as running:

        def start(*arguments: str, on_terminal: bool = False) -> Served:
            served = Served(
                new_run_dir(),
                f"--model-repository={default_model_repository()}",
                f"--model={model}",
                *("--set", f"num_threads={share.num_threads()}"),
                *(argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")),
                *arguments,
                on_terminal=on_terminal,
            )
            return running.enter_context(contextlib.closing(served))

        yield start


def sessions_command(socket: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs ``microturn sessions`` on the server of an admin socket."""
    command = [sys.executable, "-m", "microturn.cli", "sessions", *map(str, arguments), "--socket", str(socket)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


class Served:
    """A running ``microturn serve``, of the light model unless told.

    Args:
        run_dir: where its run directory and its log are made.
        arguments: further options.
        on_terminal: whether stdout and stderr are one pseudo terminal; else each is a pipe.
    """

    def __init__(self, run_dir: Path, *arguments: str, on_terminal: bool = False) -> None:
        self._run_dir = run_dir
        self._run_name: str | None = None
        ports = free_ports(4)
        named_ports = zip(("grpc", "metrics", "health", "http-health"), ports, strict=True)
        self.grpc_port, self.metrics_port, self.health_port, self.http_health_port = ports
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.metrics_url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        self.channel = grpc.insecure_channel(self.address)
        self._health_channel = grpc.insecure_channel(f"127.0.0.1:{self.health_port}")
        terminal, side = pty.openpty() if on_terminal else (None, subprocess.PIPE)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "microturn.cli", "serve"),
                *(f"--model-repository={_LIGHT_REPOSITORY}", f"--run-dir={run_dir}"),
                *(f"--{name}-port={port}" for name, port in named_ports),
                *arguments,
            ],
            stdout=side,
            stderr=side,
            text=True,
        )
        streams = [self.process.stdout, self.process.stderr]
        if terminal is not None:
            os.close(side)
            streams = [os.fdopen(terminal)]
        self.said: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._readers = [threading.Thread(target=self._read, args=(stream,)) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream, contextlib.suppress(OSError):  # so a terminal ends, when all that wrote to it are gone
            for line in stream:
                self.said.append(line.rstrip())
                self._lines.put(line.rstrip())

    def wait_for_line(self, beginning: str, timeout_s: float = 60.0) -> str:
        """The next line that begins so."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and (self._may_say_more() or not self._lines.empty()):
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.1)
                if line.startswith(beginning):
                    return line
        pytest.fail(f"no line '{beginning}…' within {timeout_s} s, but: {self.said}")

    def _may_say_more(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        self.wait_for_line("ready in ", timeout_s)
        (run,) = self._run_dir.glob("microturn-*")
        self._run_name = run.name

    def wait_for_exit(self, timeout_s: float = 60.0) -> int:
        """Its exit code; what it has said is all there then."""
        exit_code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return exit_code

    def tree(self) -> list[psutil.Process]:
        """Warden, server and model process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def model_process(self) -> psutil.Process:
        (found,) = find_descendants(self.process.pid, STUB_NAME)
        return found

    def traces(self) -> list[Path]:
        """What is on the machine of this run, which was ready once."""
        assert self._run_name is not None
        return [*self._run_dir.glob(self._run_name), *SHARED_MEMORY.glob(f"{self._run_name}*")]

    def health(self, service: str = "") -> str:
        check = health_pb2_grpc.HealthStub(self._health_channel).Check
        status = check(health_pb2.HealthCheckRequest(service=service), timeout=30, wait_for_ready=True).status
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))

    def wait_for_health(self, expected: str, timeout_s: float = 60.0, service: str = "") -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.health(service) != expected:
            assert time.monotonic() < deadline_s, f"not {expected} within {timeout_s} s"
            time.sleep(0.02)

    def turn(self, sequence_id: int, *, end: bool = True) -> list[str]:
        """Takes a first turn without tokens; returns the names of the outputs."""
        request = service_pb2.ModelInferRequest(model_name="streaming_llm")
        request.parameters["sequence_id"].int64_param = sequence_id
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = end
        request.inputs.add(name="input_ids", datatype="INT32", shape=[1, 0])
        request.raw_input_contents.append(b"")
        triton = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        (response,) = list(triton.ModelStreamInfer(iter([request]), timeout=30))
        assert response.error_message == ""
        return [output.name for output in response.infer_response.outputs]

    def close(self) -> None:
        remaining = self.tree() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        kill_all(alive_after(remaining, 10))
        for reader in self._readers:
            reader.join()
        self.channel.close()
        self._health_channel.close()
