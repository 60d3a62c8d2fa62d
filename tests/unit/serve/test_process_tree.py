"""Real processes; each test runs in a process of its own, since a subreaper stays one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import psutil

from microturn.serve.process_tree import find_descendants, is_alive
from support.processes import alive_after

# A child that starts a grandchild and ends, so that the grandchild is an orphan.
ORPHAN = "sleep 60 & echo $!"


def run(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()


def test_orphans_and_all_are_killed():
    script = f"""
import subprocess, psutil
from microturn.serve.process_tree import become_subreaper, kill_descendants
become_subreaper()
subprocess.run(["sh", "-c", {ORPHAN!r}], stdout=subprocess.DEVNULL)
deep = subprocess.Popen(["sh", "-c", "sleep 60; true"])
while len(psutil.Process().children(recursive=True)) < 3: pass
print(kill_descendants(), psutil.Process().children(recursive=True))
"""
    assert run(script) == "True []"


def test_a_child_dies_with_its_parent():
    script = """
import os, subprocess
from functools import partial
from microturn.serve.process_tree import die_with_parent
child = partial(die_with_parent, os.getpid())
print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, preexec_fn=child).pid)
"""
    pid = int(run(script))
    with contextlib.suppress(psutil.NoSuchProcess):
        assert alive_after([psutil.Process(pid)], 5) == []


def test_a_child_whose_parent_is_dead_already_ends_at_once():
    script = "from microturn.serve.process_tree import die_with_parent; die_with_parent(2**22 + 1)"
    done = subprocess.run([sys.executable, "-c", script], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL


def test_descendants_are_found_by_name_until_they_end():
    with subprocess.Popen(["sh", "-c", "sleep 60; true"]) as shell:
        try:
            found: list[psutil.Process] = []
            while not found:
                found = find_descendants(shell.pid, "sleep")
            assert is_alive(found[0])
            assert find_descendants(shell.pid, "other") == []
        finally:
            for process in psutil.Process(shell.pid).children():
                process.kill()
    assert not is_alive(found[0])
    assert find_descendants(shell.pid, "sleep") == []


def test_a_zombie_is_not_alive():
    with subprocess.Popen(["true"]) as child:
        zombie = psutil.Process(child.pid)
        while zombie.status() != psutil.STATUS_ZOMBIE:
            pass
        assert not is_alive(zombie)
