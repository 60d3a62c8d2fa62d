"""A server's processes, with a stand-in for Triton: a program with a model process, which listens."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from microturn.serve.child import free_ports
from microturn.serve.process_tree import find_descendants
from microturn.serve.run_directory import RunDirectory
from microturn.serve.server_log import ServerLog
from microturn.serve.server_tree import ServerTree
from microturn.serve.triton_server import STUB_NAME
from support.client_contract import wait_until

SERVER = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
model = subprocess.Popen([sys.argv[2], "60"])
client, _ = listener.accept()
model.wait()
assert not client.recv(1)
client.close()
listener.accept()
"""


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def tree(tmp_path: Path, port: int) -> Iterator[ServerTree]:
    stub = tmp_path / STUB_NAME
    stub.symlink_to("/bin/sleep")
    command = [sys.executable, "-c", SERVER, str(port), str(stub)]
    with RunDirectory.create(tmp_path) as (run, lock), ServerLog(None, is_text=False) as log:
        tree = ServerTree(command, os.environ, run, lock, log)
        try:
            yield tree
        finally:
            tree.kill()
            # With all descendants goes the process that multiprocessing keeps for tests that came before.
            with suppress(ChildProcessError):
                resource_tracker._resource_tracker._stop()


def test_a_stopping_server_is_done_when_its_model_and_its_clients_have_gone(tree: ServerTree, port: int) -> None:
    assert not tree.is_done(port)  # nothing is recorded
    wait_until(lambda: bool(find_descendants(os.getpid(), STUB_NAME)), 30)
    tree.watch_model_processes()
    (model,) = find_descendants(os.getpid(), STUB_NAME)
    client = socket.create_connection(("127.0.0.1", port))
    assert not tree.is_done(port)
    model.kill()
    wait_until(lambda: tree.dead_model_process() == model.pid, 30)
    assert not tree.is_done(port)
    assert tree.is_done(port + 1)  # another port, such as that of metrics
    client.close()
    wait_until(lambda: tree.is_done(port), 30)
    assert tree.exit_code() is None
