"""Tests of own_directory."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from microturn.offload.own_directory import OwnDirectory

OWNER = """
import sys, time
from pathlib import Path
from microturn.offload.own_directory import OwnDirectory
directory = OwnDirectory(Path(sys.argv[1]))
(directory.path / "1.safetensors").write_bytes(b"KV")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "made" / "too"


def start_owner(parent: Path) -> subprocess.Popen[bytes]:
    """Another process that has a directory there, with a file in it."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    return owner


def kill(owner: subprocess.Popen[bytes]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def test_it_is_new_empty_and_private(parent: Path) -> None:
    first, second = OwnDirectory(parent), OwnDirectory(parent)
    assert first.path != second.path
    assert {first.path, second.path} == set(parent.iterdir())
    assert list(first.path.iterdir()) == []
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    first.remove()
    second.remove()


def test_it_goes_with_all_that_is_in_it(parent: Path) -> None:
    directory = OwnDirectory(parent)
    (directory.path / "1.safetensors").write_bytes(b"KV")
    directory.remove()
    assert list(parent.iterdir()) == []


def test_that_of_a_living_process_stays_and_that_of_a_killed_one_goes(parent: Path) -> None:
    owner = start_owner(parent)
    try:
        (theirs,) = parent.iterdir()
        OwnDirectory(parent).remove()
        assert (theirs / "1.safetensors").read_bytes() == b"KV"
    finally:
        kill(owner)
    ours = OwnDirectory(parent)
    assert list(parent.iterdir()) == [ours.path]
    ours.remove()


def test_the_named_directory_may_be_a_link(parent: Path, tmp_path: Path) -> None:
    """A server whose `disk_tier_dir` was one was refused at the start: Not a directory."""
    parent.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(parent)
    directory = OwnDirectory(link)
    link.unlink()
    assert list(parent.iterdir()) == [directory.path], "where the link leads later does not matter"
    directory.remove()
    assert list(parent.iterdir()) == []


def test_what_is_not_ours_stays(parent: Path, tmp_path: Path) -> None:
    """Neither files of that name nor links to elsewhere are touched, nor other directories."""
    parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (parent / "microturn-kv-link").symlink_to(elsewhere)
    (parent / "microturn-kv-file").touch()
    (parent / "other").mkdir()
    OwnDirectory(parent).remove()
    assert sorted(path.name for path in parent.iterdir()) == ["microturn-kv-file", "microturn-kv-link", "other"]
    assert (elsewhere / "precious").exists()


def test_a_parent_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        OwnDirectory(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208  the names, no more
