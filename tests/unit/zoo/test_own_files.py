"""Users' own GGUF files: converted once, and anew when they change."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from microturn.errors import InvalidArgument, ResourceExhausted
from microturn.zoo.store import resolve_model
from support import gguf_files, store_workers

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    gguf_files.write_llama(tmp_path / "my model.Q4.gguf")
    return tmp_path / "my model.Q4.gguf"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MICROTURN_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "converted"


def _inode(model_dir: Path) -> int:
    return (model_dir / "model.safetensors").stat().st_ino


def test_a_gguf_file_is_converted_once(gguf_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = resolve_model(str(gguf_path))
    assert model_dir.parent == own_cache
    assert model_dir.name.startswith("my_model.Q4-")
    assert AutoModelForCausalLM.from_pretrained(model_dir).config.model_type == "llama"
    inode = _inode(model_dir)
    monkeypatch.chdir(gguf_path.parent)
    assert resolve_model(gguf_path.name) == model_dir
    assert _inode(model_dir) == inode
    assert json.loads((model_dir / "microturn-manifest.json").read_text())["source"] == str(gguf_path)


@pytest.mark.parametrize("change", ["its time", "its bytes alone"])
def test_a_changed_file_is_converted_anew_in_place_of_the_old_one(
    gguf_path: Path, own_cache: Path, change: str
) -> None:
    model_dir = resolve_model(str(gguf_path))
    inode, stat = _inode(model_dir), gguf_path.stat()
    if change == "its time":
        os.utime(gguf_path, ns=(0, stat.st_mtime_ns + 1))
    else:
        whole = bytearray(gguf_path.read_bytes())
        whole[-4:] = b"\0\0\0\0"
        gguf_path.write_bytes(whole)
        os.utime(gguf_path, ns=(0, stat.st_mtime_ns))
    assert resolve_model(str(gguf_path)) == model_dir
    assert _inode(model_dir) != inode
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [model_dir.name]


def test_files_of_one_name_in_two_folders_are_two_models(gguf_path: Path, own_cache: Path) -> None:
    copied = gguf_path.parent / "copy" / gguf_path.name
    copied.parent.mkdir()
    shutil.copy2(gguf_path, copied)
    assert {resolve_model(str(gguf_path)), resolve_model(str(copied))} == set(own_cache.glob("my_model.Q4-*"))


def test_concurrent_servers_convert_a_file_once(gguf_path: Path, own_cache: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=SPAWN) as pool:
        assert len(set(pool.map(resolve_model, [str(gguf_path)] * 3))) == 1
    assert len([path for path in own_cache.iterdir() if path.is_dir()]) == 1


def test_a_conversion_that_does_not_fit_leaves_nothing_and_says_how_much_it_needs(
    gguf_path: Path, own_cache: Path
) -> None:
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        message = pool.submit(store_workers.resolve_with_small_files, str(gguf_path), 4096).result()
    assert message.startswith(f"FAILED_PRECONDITION: cannot use the model cache {own_cache} (File too large)")
    assert not any(path.is_dir() for path in own_cache.iterdir())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(ResourceExhausted, match=r"preparing my_model\.Q4-\w+ needs 0 MB in .*: free some space"):
            resolve_model(str(gguf_path))


def test_a_file_that_is_no_gguf_file_is_refused_before_anything_is_written(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no")
    with pytest.raises(InvalidArgument, match=r"m\.gguf cannot be read as a whole GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert not own_cache.parent.exists()
