"""Tests of snapshots.file: a file is whole, or it is refused."""

from __future__ import annotations

import random
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from microturn.errors import FailedPrecondition
from microturn.ownership import KeyHash
from microturn.snapshots.file import UnreadableSnapshot, claim, read_header, read_snapshot, write_snapshot
from microturn.snapshots.snapshot import Header, Snapshot

SNAPSHOT = Snapshot(
    Header("a-session", 17, "ab" * 16, 4e9, KeyHash.of("ours"), '"checksum":"' + "0" * 64 + '"'),
    {"seed": 2**63 - 1, "text": 'Grüße, \ud83d and "quotes"', "list": [1.5, None]},
    {"token_ids": torch.arange(1000, dtype=torch.int32), "marks": torch.zeros(0, 3, dtype=torch.int64)},
)

_WRITE_WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
from microturn.errors import MicroturnError
from microturn.snapshots.file import read_snapshot, write_snapshot
path = Path(sys.argv[1])
snapshot = read_snapshot(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
try:
    write_snapshot(path, snapshot)
except MicroturnError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.snapshot"
    write_snapshot(path, SNAPSHOT)
    return path


def test_what_was_written_is_read(path: Path) -> None:
    read = read_snapshot(path)
    assert (read.header, read.state) == (SNAPSHOT.header, SNAPSHOT.state)
    assert read.tensors.keys() == SNAPSHOT.tensors.keys()
    for name, tensor in SNAPSHOT.tensors.items():
        assert torch.equal(read.tensors[name], tensor)
        assert read.tensors[name].dtype == tensor.dtype
    assert read_header(path) == SNAPSHOT.header


def test_only_the_owner_may_read_it(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_a_safetensors_file(path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"state", "token_ids", "marks"}
        assert file.metadata()["format_version"] == "1"


def test_a_flipped_bit_is_found_wherever_it_is(path: Path) -> None:
    content = path.read_bytes()
    rng = random.Random(1)
    header_len = int.from_bytes(content[:8], "little")
    places = {*range(8 + header_len), *rng.sample(range(len(content)), 500), len(content) - 1}
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(UnreadableSnapshot):
            read_snapshot(path)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, 700, 1000, -1])
def test_a_truncated_file_is_refused(path: Path, kept: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    with pytest.raises(UnreadableSnapshot):
        read_snapshot(path)


@pytest.mark.parametrize("content", [b"", b"hello, this is no snapshot", b"\xff" * 4096, b"\0" * 4096])
def test_what_is_no_snapshot_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (read_snapshot, read_header):
        with pytest.raises(UnreadableSnapshot):
            read(path)


def test_a_file_of_another_version_is_refused_in_words(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format_version":"1"', b'"format_version":"9"'))
    with pytest.raises(UnreadableSnapshot, match="format version 9, and 1 is read here"):
        read_snapshot(path)


def test_a_file_that_is_not_there_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none")


def test_a_file_is_replaced_whole(path: Path) -> None:
    newer = Snapshot(SNAPSHOT.header, {"seed": 1}, SNAPSHOT.tensors)
    write_snapshot(path, newer)
    assert read_snapshot(path).state == {"seed": 1}
    assert [file.name for file in path.parent.iterdir()] == ["a.snapshot"]


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"cannot write .*: No such file or directory"):
        write_snapshot(tmp_path / "none" / "a.snapshot", SNAPSHOT)


def test_no_room_is_said_and_leaves_what_was_there(path: Path) -> None:
    """The system lets the process write so much and no more, in the middle of the file."""
    before = path.read_bytes()
    said = subprocess.run(
        [sys.executable, "-c", _WRITE_WITHOUT_ROOM, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.startswith(f"RESOURCE_EXHAUSTED: no room for {path}")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.snapshot"]


def test_of_many_who_claim_one_gets_it(path: Path) -> None:
    claimed = path.with_suffix(".claimed")
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda _: claim(path, claimed), range(8)))
    assert won.count(True) == 1
    assert not path.exists()


def test_a_claimed_file_keeps_its_header_alone(path: Path) -> None:
    claimed = path.with_suffix(".claimed")
    whole = path.read_bytes()
    assert claim(path, claimed)
    assert read_header(claimed) == SNAPSHOT.header
    assert claimed.read_bytes() == whole[: 8 + int.from_bytes(whole[:8], "little")]
    assert b"quotes" not in claimed.read_bytes()
    with pytest.raises(UnreadableSnapshot):
        read_snapshot(claimed)
