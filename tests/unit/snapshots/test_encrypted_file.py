"""Tests of snapshots.encrypted_file and encrypted_storage: what is not as it was written does not decrypt."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from microturn.offload.image_file import DamagedFile
from microturn.snapshots import encrypted_file
from microturn.snapshots.encrypted_file import CHUNK_BYTES, PREFIX_BYTES, TAG_BYTES, Secret
from microturn.snapshots.encrypted_storage import EncryptedStorage
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.storage import Content

SEALED_BYTES = CHUNK_BYTES + TAG_BYTES
HEAD = random.Random(1).randbytes(100)
BODY = random.Random(2).randbytes(3 * CHUNK_BYTES + 77)


@pytest.fixture
def storage(tmp_path: Path) -> EncryptedStorage:
    return EncryptedStorage(FileStorage(tmp_path), Secret("sixteen letters!"))


def content(head: bytes = HEAD, body: bytes = BODY, piece: int = 100_000) -> Content:
    pieces = [body[start : start + piece] for start in range(0, len(body), piece)]
    return Content(head, pieces, len(head) + len(body))


def read_all(storage: EncryptedStorage, name: str = "a.snapshot") -> bytes:
    with storage.open(name) as file:
        return file.read(1 << 30)


@pytest.mark.parametrize("head_len", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("body_len", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("piece", [9999, 1 << 20])
def test_what_was_written_is_read(
    storage: EncryptedStorage, tmp_path: Path, head_len: int, body_len: int, piece: int
) -> None:
    chance = random.Random(head_len + body_len)
    plain = chance.randbytes(head_len + body_len)
    written = content(plain[:head_len], plain[head_len:], piece)
    storage.write("a.snapshot", written)
    raw = (tmp_path / "a.snapshot").read_bytes()
    assert len(raw) == encrypted_file.encrypted(written, Secret("sixteen letters!"), "a").num_bytes
    assert len(plain) < 16 or plain[:16] not in raw
    with storage.open("a.snapshot") as file:
        assert file.num_bytes == len(plain)
        assert file.read(len(plain) + 1) == plain
        assert file.read(1) == b""
        for _ in range(20):
            place, length = chance.randrange(len(plain) + 1), chance.randrange(400_000)
            file.seek(place)
            assert file.read(length) == plain[place : place + length]


def flipped(raw: bytearray, at: int = -1) -> None:
    raw[at] ^= 1


def swapped(raw: bytearray) -> None:
    first = PREFIX_BYTES + len(HEAD) + TAG_BYTES
    one, other = raw[first : first + SEALED_BYTES], raw[first + SEALED_BYTES : first + 2 * SEALED_BYTES]
    raw[first : first + 2 * SEALED_BYTES] = other + one


def without_one(raw: bytearray) -> None:
    first = PREFIX_BYTES + len(HEAD) + TAG_BYTES
    del raw[first : first + SEALED_BYTES]


def without_the_last(raw: bytearray) -> None:
    del raw[-(77 + TAG_BYTES) :]


def without_the_body(raw: bytearray) -> None:
    del raw[PREFIX_BYTES + len(HEAD) + TAG_BYTES :]


def of_another_head_length(raw: bytearray) -> None:
    raw[PREFIX_BYTES - 8] -= 1


DAMAGES = [flipped, swapped, without_one, without_the_last, without_the_body, of_another_head_length]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_changed_does_not_decrypt(
    storage: EncryptedStorage, tmp_path: Path, damage: Callable[[bytearray], None]
) -> None:
    storage.write("a.snapshot", content())
    raw = bytearray((tmp_path / "a.snapshot").read_bytes())
    damage(raw)
    (tmp_path / "a.snapshot").write_bytes(raw)
    with pytest.raises(DamagedFile):
        read_all(storage)


@pytest.mark.parametrize("end", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 50, -SEALED_BYTES, -100, -17, -1])
def test_a_file_that_was_cut_off_does_not_decrypt(storage: EncryptedStorage, tmp_path: Path, end: int) -> None:
    storage.write("a.snapshot", content())
    raw = (tmp_path / "a.snapshot").read_bytes()
    (tmp_path / "a.snapshot").write_bytes(raw[:end])
    with pytest.raises(DamagedFile):
        read_all(storage)


def test_a_flipped_bit_is_found_wherever_it_is(storage: EncryptedStorage, tmp_path: Path) -> None:
    storage.write("a.snapshot", content(HEAD, b"a body"))
    whole = (tmp_path / "a.snapshot").read_bytes()
    for place in range(len(whole)):
        raw = bytearray(whole)
        flipped(raw, place)
        (tmp_path / "a.snapshot").write_bytes(raw)
        with pytest.raises(DamagedFile):
            read_all(storage)


def test_a_file_under_the_name_of_another_does_not_decrypt(storage: EncryptedStorage, tmp_path: Path) -> None:
    storage.write("a.snapshot", content())
    (tmp_path / "a.kv").mkdir()
    for name in ("b.snapshot", "a.kv/17"):
        (tmp_path / name).write_bytes((tmp_path / "a.snapshot").read_bytes())
        with pytest.raises(DamagedFile):
            read_all(storage, name)


def test_another_secret_and_none_are_told_apart(storage: EncryptedStorage, tmp_path: Path) -> None:
    storage.write("a.snapshot", content())
    other = EncryptedStorage(FileStorage(tmp_path), Secret("another letters!"))
    with pytest.raises(DamagedFile, match="another secret"):
        read_all(other)
    FileStorage(tmp_path).write("b.snapshot", content())
    with pytest.raises(DamagedFile, match="not encrypted"):
        read_all(storage, "b.snapshot")


def test_a_moved_file_and_its_head_alone_can_be_read(storage: EncryptedStorage) -> None:
    storage.write("a.snapshot", content())
    assert storage.move("a.snapshot", "a.claimed")
    assert read_all(storage, "a.claimed") == HEAD + BODY
    storage.cut("a.claimed", storage.id_of("a.claimed"), len(HEAD))
    with storage.open("a.claimed") as file:
        assert file.read(len(HEAD)) == HEAD
        with pytest.raises(DamagedFile, match="before its last chunk"):
            file.read(1)


def test_two_files_of_the_same_content_differ(storage: EncryptedStorage, tmp_path: Path) -> None:
    raw = []
    for _ in range(2):
        storage.write("a.snapshot", content())
        raw.append((tmp_path / "a.snapshot").read_bytes()[-1000:])
    assert raw[0] != raw[1]
