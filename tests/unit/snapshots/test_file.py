"""Tests of snapshots.file: a file is whole, or it is refused."""

from __future__ import annotations

import random
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from microturn.errors import DeadlineExceeded, FailedPrecondition
from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import DamagedFile
from microturn.sessions.ownership import KeyHash
from microturn.snapshots.claimed_kv import ClaimedFile, ClaimedKV
from microturn.snapshots.file import (
    UnreadableSnapshot,
    read_header,
    read_snapshot,
    write_snapshot,
)
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.snapshot import Header, Snapshot
from support.tiers import contents_of, make_kv, tensors_of

SNAPSHOT = Snapshot(
    Header("a-session", 17, "ab" * 16, 4e9, KeyHash.of("ours"), '"checksum":"' + "0" * 64 + '"'),
    {"seed": 2**63 - 1, "text": 'Grüße, \ud83d and "quotes"', "list": [1.5, None]},
    {"token_ids": torch.arange(1000, dtype=torch.int32), "marks": torch.zeros(0, 3, dtype=torch.int64)},
)

_WRITE_WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
import torch
from microturn.errors import MicroturnError
from microturn.kv.image import KVImage, PagePart
from microturn.kv.table_state import TableState
from microturn.snapshots.file import read_snapshot, write_snapshot
from microturn.offload.copies import KVCopy
path = Path(sys.argv[1])
snapshot = read_snapshot(path)
kv = KVCopy(TableState(4, 2000), KVImage([PagePart((4, 3), torch.int64)], 500)) if sys.argv[2:] else None
num_bytes = path.stat().st_size + 4096 if kv else 2048
resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
try:
    write_snapshot(path, snapshot, kv)
except MicroturnError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.snapshot"
    write_snapshot(path, SNAPSHOT)
    return path


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file)


def test_what_was_written_is_read(path: Path) -> None:
    read = read_snapshot(path)
    assert (read.header, read.state) == (SNAPSHOT.header, SNAPSHOT.state)
    assert read.tensors.keys() == SNAPSHOT.tensors.keys()
    for name, tensor in SNAPSHOT.tensors.items():
        assert torch.equal(read.tensors[name], tensor)
        assert read.tensors[name].dtype == tensor.dtype
    assert header_of(path) == SNAPSHOT.header


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
    for read in (read_snapshot, header_of):
        with pytest.raises(UnreadableSnapshot):
            read(path)


def test_a_file_of_another_version_is_refused_in_words(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format_version":"1"', b'"format_version":"9"'))
    with pytest.raises(UnreadableSnapshot, match="format version 9, and 2 is read here"):
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


@pytest.mark.parametrize("arguments", [[], ["with KV"]])
def test_no_room_is_said_and_leaves_what_was_there(path: Path, arguments: list[str]) -> None:
    """The system lets the process write so much and no more, in the middle of the file, or of its KV."""
    before = path.read_bytes()
    command = [sys.executable, "-c", _WRITE_WITHOUT_ROOM, str(path), *arguments]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.startswith(f"RESOURCE_EXHAUSTED: no room for {path}")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.snapshot"]


def test_of_many_who_claim_one_gets_it(path: Path) -> None:
    storage = FileStorage(path.parent)
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda _: storage.move("a.snapshot", "a.claimed"), range(8)))
    assert won.count(True) == 1
    assert not path.exists()


def test_a_file_keeps_its_header_alone(path: Path) -> None:
    claimed = path.with_suffix(".claimed")
    whole = path.read_bytes()
    assert FileStorage(path.parent).move("a.snapshot", "a.claimed")
    assert claimed.read_bytes() == whole
    ClaimedFile(FileStorage(path.parent), "a.claimed").drop_content()
    assert header_of(claimed) == SNAPSHOT.header
    assert claimed.read_bytes() == whole[: 8 + int.from_bytes(whole[:8], "little")]
    assert b"quotes" not in claimed.read_bytes()
    with pytest.raises(UnreadableSnapshot):
        read_snapshot(claimed)


# ---- KV ------------------------------------------------------------------------------------------------------------

KV = make_kv(8)
STATE = TableState(page_size=4, kv_len=10)


@pytest.fixture
def with_kv(path: Path) -> Path:
    """The snapshot again, with the KV of three pages."""
    write_snapshot(path, SNAPSHOT, KVCopy(STATE, KV.read([6, 2, 3])))
    return path


def read_kv(path: Path) -> bytes:
    """All bytes of a snapshot's KV."""
    part = read_snapshot(path).kv
    assert part is not None
    pages = KV.new_image(3)
    ClaimedKV(ClaimedFile(FileStorage(path.parent), path.name), part).read(pages)
    return contents_of(pages)


def test_kv_is_read_as_it_was_written(with_kv: Path) -> None:
    read = read_snapshot(with_kv)
    assert read.state == SNAPSHOT.state
    assert read.tensors.keys() == SNAPSHOT.tensors.keys()
    assert read.kv is not None
    assert read.kv.state == STATE
    assert read.kv.is_of(KV.page_parts)
    assert read_kv(with_kv) == contents_of(KV.read([6, 2, 3]))
    assert stat.S_IMODE(with_kv.stat().st_mode) == 0o600


def test_a_snapshot_without_kv_says_so(path: Path) -> None:
    assert read_snapshot(path).kv is None


def test_with_kv_it_is_a_safetensors_file_too(with_kv: Path) -> None:
    expected = tensors_of(KV.read([6, 2, 3]))
    with safe_open(with_kv, "pt") as file:
        assert set(file.keys()) == {"state", "token_ids", "marks", *(f"kv.{number}" for number in range(len(expected)))}
        for number, tensor in enumerate(expected):
            found = file.get_tensor(f"kv.{number}")
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_a_flipped_bit_in_kv_costs_the_kv_alone(with_kv: Path) -> None:
    content = with_kv.read_bytes()
    part = read_snapshot(with_kv).kv
    assert part is not None
    for place in (part.start, part.start + part.num_bytes // 2, len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 1
        with_kv.write_bytes(flipped)
        assert read_snapshot(with_kv).state == SNAPSHOT.state
        with pytest.raises(DamagedFile, match="checksum"):
            read_kv(with_kv)


def test_a_flipped_bit_before_the_kv_is_found_wherever_it_is(with_kv: Path) -> None:
    """A comma between two offsets that became a point was an IndexError, which nobody had thought of."""
    content = with_kv.read_bytes()
    part = read_snapshot(with_kv).kv
    assert part is not None
    rng = random.Random(2)
    for place in {*range(8 + int.from_bytes(content[:8], "little")), *range(part.start - 9, part.start)}:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        with_kv.write_bytes(flipped)
        with pytest.raises(UnreadableSnapshot):
            read_snapshot(with_kv)


def test_a_file_that_ends_within_its_kv_holds_the_session(with_kv: Path) -> None:
    content = with_kv.read_bytes()
    part = read_snapshot(with_kv).kv
    assert part is not None
    for end in (part.start, part.start + 1, len(content) - 1):
        with_kv.write_bytes(content[:end])
        assert read_snapshot(with_kv).state == SNAPSHOT.state
        with pytest.raises(DamagedFile, match="bytes of tensors are not"):
            read_kv(with_kv)
    with_kv.write_bytes(content[: part.start - 1])
    with pytest.raises(UnreadableSnapshot):
        read_snapshot(with_kv)


def test_kv_that_takes_too_long_leaves_what_was_there(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(DeadlineExceeded, match="0 of 1056 bytes of KV were written in time"):
        write_snapshot(path, SNAPSHOT, KVCopy(STATE, KV.read([6, 2, 3])), until_s=time.monotonic())
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.snapshot"]
