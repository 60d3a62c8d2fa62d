"""Builds a llama.cpp server for `make bench-peers`, and the models that it serves, into the cache directory.

No package index has the server as a program for this platform. The source package of llama-cpp-python (MIT, as
llama.cpp itself) carries all of llama.cpp; cmake comes as a wheel, a C++ compiler must be there. The build is for this
very machine's instructions and takes two cores some ten minutes. It can be interrupted and goes on where it was.

The models are made from the same GGUF file as our own weights, whose 4 bits are made floats first: `f32.gguf` has
exactly our numbers, and `q8_0.gguf` has them in 8 bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from microturn.zoo.cache import default_cache_dir
from microturn.zoo.embedded_models import EMBEDDED_MODELS, fetch_gguf

_SOURCE = "llama-cpp-python==0.3.36"
_CMAKE = "cmake>=3.28,<4"
_MODEL = "smollm2-135m"
# No web page, which would have to be downloaded, and no TLS.
_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF")
_NO_PAGE = ("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF")
_PROGRAMS = ("llama-server", "llama-quantize")
_TYPES = ("f32", "q8_0")


@dataclass(frozen=True)
class LlamaCpp:
    """What was built.

    Attributes:
        server: the program, or None.
        ggufs: the models.
    """

    server: Path | None
    ggufs: Sequence[Path]


def built_llama_cpp() -> LlamaCpp:
    """What is in the cache."""
    server = _root() / "build" / "bin" / "llama-server"
    ggufs = [_root() / f"{kind}.gguf" for kind in _TYPES]
    return LlamaCpp(server if server.exists() else None, [gguf for gguf in ggufs if gguf.exists()])


def build_llama_cpp() -> None:
    """Builds what is missing and prints where everything is.

    Raises:
        CalledProcessError: when pip, cmake or the compiler fails; each has said why.
    """
    root = _root()
    sources, build = root / "sources", root / "build"
    if not sources.exists():
        _fetch_sources(sources)
    cmake = _cmake(root / "cmake")
    if not (build / "CMakeCache.txt").exists():
        _run([cmake, "-S", sources / "vendor" / "llama.cpp", "-B", build, *_OPTIONS, *_NO_PAGE])
    num_cores = str(len(os.sched_getaffinity(0)))
    _run([cmake, "--build", build, "--parallel", num_cores, "--target", *_PROGRAMS])
    for kind in _TYPES:
        if not (root / f"{kind}.gguf").exists():
            _quantize(build / "bin" / "llama-quantize", root, kind)
    built = built_llama_cpp()
    print(built.server, *built.ggufs, sep="\n")


def _root() -> Path:
    return default_cache_dir() / "peers" / "llama.cpp"


def _fetch_sources(sources: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_made(sources.parent)) as work_dir:
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", work_dir]
        _run([sys.executable, *download, _SOURCE])
        (archive,) = Path(work_dir).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(work_dir, filter="data")
        archive.with_suffix("").with_suffix("").rename(sources)


def _cmake(environment: Path) -> Path:
    cmake = environment / "bin" / "cmake"
    if not cmake.exists():
        _run([sys.executable, "-m", "venv", "--clear", environment])
        _run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", _CMAKE])
    return cmake


def _quantize(quantize: Path, root: Path, kind: str) -> None:
    """Makes a model of one type; first as floats, since 8 bits of 4 bits would be rounded twice."""
    with tempfile.TemporaryDirectory(dir=root) as work_dir:
        given = root / "f32.gguf" if kind != "f32" else fetch_gguf(EMBEDDED_MODELS[_MODEL], Path(work_dir))
        made = Path(work_dir) / "made.gguf"
        _run([quantize, "--allow-requantize", given, made, kind.upper()])
        made.rename(root / f"{kind}.gguf")


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
