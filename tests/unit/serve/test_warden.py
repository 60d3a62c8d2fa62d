"""The warden with a stand-in for the server that is as stubborn as Triton can be."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from microturn.serve import warden
from microturn.serve.process_tree import is_alive
from microturn.serve.run_directory import SHARED_MEMORY
from support.processes import alive_after

STUBBORN = "trap '' TERM; sleep 60 & echo $$ $!; wait; wait"
OBEDIENT = "trap 'exit 7' TERM; echo $$ $$; while :; do sleep 0.05; done"


class Guarded:
    """A warden with a server whose process ids are known."""

    def __init__(self, run_path: Path, server: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "microturn.serve.warden", str(run_path), "sh", "-c", server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.below = [psutil.Process(int(pid)) for pid in self.process.stdout.readline().split()]

    def order(self, order: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order)
        self.process.stdin.flush()

    def all_gone(self) -> bool:
        return not any(is_alive(process) for process in self.below)


@pytest.fixture
def run_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / f"microturn-test{os.getpid()}"
    path.mkdir()
    memory = SHARED_MEMORY / f"{path.name}-region"
    memory.touch()
    yield path
    memory.unlink(missing_ok=True)


@pytest.fixture
def guard(run_path: Path) -> Iterator[type[Guarded]]:
    with contextlib.ExitStack() as stack:

        def start(server: str) -> Guarded:
            guarded = Guarded(run_path, server)
            stack.enter_context(guarded.process)
            stack.callback(guarded.process.kill)
            return guarded

        yield start


def test_a_stop_reaches_the_server_and_its_exit_code_comes_back(guard):
    guarded = guard(OBEDIENT)
    guarded.order(warden.STOP)
    assert guarded.process.wait(10) == 7
    assert guarded.all_gone()


def test_a_stubborn_server_is_killed_on_order(guard, run_path):
    guarded = guard(STUBBORN)
    guarded.order(warden.STOP)
    with pytest.raises(subprocess.TimeoutExpired):
        guarded.process.wait(0.5)
    guarded.order(warden.KILL)
    assert guarded.process.wait(10) == 128 + 9
    assert guarded.all_gone()
    assert run_path.is_dir()  # the supervisor lives and cleans up by itself


def test_when_the_orders_end_everything_is_killed_and_cleaned_up(guard, run_path):
    guarded = guard(STUBBORN)
    guarded.process.stdin.close()
    assert guarded.process.wait(10) == 128 + 9
    assert guarded.all_gone()
    assert not run_path.exists()
    assert list(SHARED_MEMORY.glob(f"{run_path.name}*")) == []


def test_a_signal_to_everybody_does_not_keep_the_warden_from_its_duty(guard):
    """As a service manager sends it to every process of a service."""
    guarded = guard(STUBBORN)
    guarded.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        guarded.process.wait(0.5)
    guarded.process.stdin.close()
    guarded.process.wait(10)
    assert guarded.all_gone()


def test_the_server_does_not_outlive_a_killed_warden(guard):
    guarded = guard("echo $$ $$; sleep 60")
    guarded.process.kill()
    assert alive_after(guarded.below, 5) == []
