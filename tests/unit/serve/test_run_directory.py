from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from microturn.serve.errors import ServeError
from microturn.serve.process_tree import is_alive
from microturn.serve.run_directory import SHARED_MEMORY, RunDirectory, living_runs, remove_leftovers


def shared_memory_of(run: RunDirectory) -> list[str]:
    return sorted(file.name for file in SHARED_MEMORY.glob(f"{run.path.name}*"))


def test_a_run_leaves_nothing(tmp_path: Path):
    with RunDirectory.create(tmp_path / "new") as (run, _):
        assert run.path.parent == tmp_path / "new"
        assert run.path.stat().st_mode & 0o777 == 0o700
        (run.path / "file").touch()
        (SHARED_MEMORY / f"{run.shm_prefix}region").touch()
        assert shared_memory_of(run) == [f"{run.path.name}-region", f"{run.path.name}.lock"]
    assert not run.path.exists()
    assert shared_memory_of(run) == []


def test_a_restart_keeps_the_run_and_its_lock(tmp_path: Path):
    with RunDirectory.create(tmp_path) as (run, _):
        (SHARED_MEMORY / f"{run.shm_prefix}region").touch()
        run.remove_shared_memory()
        assert shared_memory_of(run) == [f"{run.path.name}.lock"]
        assert run.path.is_dir()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    before = set(SHARED_MEMORY.iterdir())
    with pytest.raises(ServeError, match="cannot make a run directory"), RunDirectory.create(tmp_path / "file"):
        pass
    assert {file for file in set(SHARED_MEMORY.iterdir()) - before if "microturn" in file.name} == set()


def test_what_lives_is_not_removed(tmp_path: Path):
    with RunDirectory.create(tmp_path) as (run, _):
        assert run.path.name not in remove_leftovers()
        assert run.path.is_dir()
        assert shared_memory_of(run) == [f"{run.path.name}.lock"]


def test_what_an_heir_still_holds_is_not_removed(tmp_path: Path):
    """The supervisor is dead, its warden still at work."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with RunDirectory.create(tmp_path) as (run, lock):
        heir = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock,))
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), lock)  # lets go of it, as a process that ends does
        assert run.path.name not in remove_leftovers()
        heir.communicate(b"\n", timeout=10)
        assert run.path.name in remove_leftovers()
        assert not run.path.exists()


def test_what_was_killed_is_removed(tmp_path: Path):
    script = (
        "import os, pathlib, signal\n"
        "from microturn.serve.run_directory import RunDirectory, SHARED_MEMORY\n"
        f"with RunDirectory.create(pathlib.Path({str(tmp_path)!r})) as (run, _):\n"
        "    (SHARED_MEMORY / (run.shm_prefix + 'region')).touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=10)
    (left,) = tmp_path.glob("microturn-*")
    run = RunDirectory(left)
    assert len(shared_memory_of(run)) == 2
    assert left.name in remove_leftovers()
    assert not left.exists()
    assert shared_memory_of(run) == []


def test_a_model_process_that_outlives_its_run_is_killed(tmp_path: Path):
    """Triton's stub has the prefix of its shared memory as an argument; one of another run goes on."""
    waiting = [sys.executable, "-c", "print(flush=True); input()"]
    with RunDirectory.create(tmp_path) as (dead, lock), RunDirectory.create(tmp_path) as (living, _):
        runs = (dead, living)
        stubs = [
            psutil.Popen([*waiting, f"{run.shm_prefix}region"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for run in runs
        ]
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), lock)  # lets go of it, as a process that ends does
        assert dead.path.name in remove_leftovers()
        assert [is_alive(stub) for stub in stubs] == [False, True]
        for stub in stubs:
            stub.communicate(b"\n", timeout=10)


def test_a_lock_cannot_have_something_else_removed(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    lock = SHARED_MEMORY / f"microturn-{os.getpid()}test.lock"
    lock.write_text(str(precious))
    try:
        assert precious.name not in remove_leftovers()
        assert precious.is_dir()
    finally:
        lock.unlink()


def test_runs_are_found_as_long_as_they_live(tmp_path: Path):
    with RunDirectory.create(tmp_path) as (run, lock):
        assert run.path in living_runs()
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), lock)  # lets go of it, as a process that ends does
        assert run.path not in living_runs()
    assert run.path not in living_runs()
