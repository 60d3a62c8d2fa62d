"""Tests of image_file: what is read is what was written, or an error."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState
from microturn.offload.image_file import DamagedFile, read_image, write_image
from support.tiers import MODEL, contents_of, make_kv, tensors_of

STATE = TableState(page_size=4, kv_len=10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.safetensors"


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond this, in the middle of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def image(dtype: torch.dtype = torch.float32) -> KVImage:
    return make_kv(8, dtype=dtype).read([6, 2, 3])


def read(path: Path, checksum: str, *, model: str = MODEL, state: TableState = STATE) -> KVImage:
    pages = make_kv(1).new_image(3)
    read_image(path, pages, model, state, checksum)
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
def test_what_is_written_is_read(path: Path, dtype: torch.dtype) -> None:
    written = image(dtype)
    checksum = write_image(path, written, MODEL, STATE)
    pages = make_kv(1, dtype=dtype).new_image(3)
    read_image(path, pages, MODEL, STATE, checksum)
    assert contents_of(pages) == contents_of(written)
    assert list(path.parent.iterdir()) == [path]


def test_the_library_opens_it_too(path: Path) -> None:
    written = image(torch.bfloat16)
    checksum = write_image(path, written, MODEL, STATE)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        for index, tensor in enumerate(tensors_of(written)):
            assert torch.equal(file.get_tensor(str(index)).view(torch.uint8), tensor.view(torch.uint8))
    assert metadata.pop("table") == json.dumps(asdict(TableState(page_size=4, kv_len=10)))
    assert metadata == {"format": "microturn-kv-1", "model": "a model", "page_size": "4", "checksum": checksum}


def test_any_flipped_bit_is_found(path: Path) -> None:
    """In the length, the header and the tensors alike: every eighth byte, each time another bit."""
    checksum = write_image(path, image(), MODEL, STATE)
    content = path.read_bytes()
    for at in range(0, len(content), 8):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at // 8 % 8)]) + content[at + 1 :])
        with pytest.raises(DamagedFile):
            read(path, checksum)
    path.write_bytes(content)
    assert contents_of(read(path, checksum)) == contents_of(image())


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 100, -2, -1])
def test_a_truncated_file_is_found(path: Path, num_bytes: int) -> None:
    checksum = write_image(path, image(), MODEL, STATE)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DamagedFile):
        read(path, checksum)


def test_a_file_that_is_too_long_is_found(path: Path) -> None:
    checksum = write_image(path, image(), MODEL, STATE)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedFile, match="more bytes of tensors than"):
        read(path, checksum)


@pytest.mark.parametrize("model", ["b model", "another model", "x" * 100])
def test_a_file_of_another_model_is_refused(path: Path, model: str) -> None:
    checksum = write_image(path, image(), model, STATE)
    with pytest.raises(DamagedFile, match="it is of another model"):
        read(path, checksum)


def test_a_file_of_another_session_is_refused(path: Path) -> None:
    """Of the same model, of the same shape, with a checksum that is right for what it holds."""
    checksum = write_image(path, image(), MODEL, STATE)
    write_image(path, make_kv(9).read([1, 2, 3]), MODEL, STATE)
    with pytest.raises(DamagedFile, match="another session"):
        read(path, checksum)


def test_another_table_is_refused(path: Path) -> None:
    checksum = write_image(path, image(), MODEL, TableState(page_size=4, kv_len=11))
    with pytest.raises(DamagedFile, match="header"):
        read(path, checksum)


def test_a_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(path, "")


@pytest.mark.parametrize("num_bytes", [0, 100, 1000])
def test_nothing_is_left_of_a_file_that_could_not_be_written(path: Path, num_bytes: int) -> None:
    with files_of_at_most(num_bytes), pytest.raises(OSError, match="File too large"):
        write_image(path, image(), MODEL, STATE)
    assert list(path.parent.iterdir()) == []
