"""Finds a Triton server and prepares what its Python backend needs to run this very interpreter.

Two kinds have the same layout, ``<home>/bin/tritonserver`` beside ``<home>/backends``: an installed one that is on PATH
(a Triton container), and the one inside the wheel nvidia-pytriton. The wheel keeps its stubs (the program that embeds
Python and runs a model) elsewhere, one per Python version, and needs its libraries in a fixed relative place; a tree of
links in the run directory provides both, and the installed package stays untouched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from microturn.serve.errors import ServeError

STUB_NAME = "triton_python_backend_stub"
# How long a thread of OpenMP's team waits actively for the others. By default it is some 300,000 rounds; then one other
# busy process on the same cores makes a turn of 0.3 s take 4 to 16 s, since waiting threads keep the cores from working
# ones. With this value it takes 1.1 s, and on a quiet machine nothing is lost (two cores, SmolLM2, 16 tokens in and 8
# out).
_SPIN_COUNT = "10000"
_PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class TritonServer:
    """A server that can run models with this interpreter.

    Attributes:
        binary: the server.
        backends: its directory of backends.
        stub: the Python backend's stub for this Python version.
        libpython: the shared library of this interpreter.
    """

    binary: Path
    backends: Path
    stub: Path
    libpython: Path

    @property
    def is_embedded(self) -> bool:
        """Whether it is the one inside the wheel, which is 24.10."""
        return self.stub.parent != self.backends / "python"

    def link_backends(self, tree: Path) -> Path:
        """Provides a backend directory whose Python backend has the right stub.

        Args:
            tree: where links may be made, a directory that does not exist yet.

        Returns:
            The directory for Triton's ``--backend-directory``.
        """
        library_dir = tree / "lib"
        library_dir.mkdir(parents=True)
        (library_dir / self.libpython.name).symlink_to(self.libpython)
        (library_dir / "libgomp.so.1.0.0").symlink_to(_find_torch_openmp())
        if not self.is_embedded:
            return self.backends
        # The wheel's RPATHs climb from backends/python to the libraries beside its package.
        home = self.backends.parent
        package_dir = home.parent.parent
        (tree / "nvidia_pytriton.libs").symlink_to(package_dir / "nvidia_pytriton.libs")
        backends = tree / home.relative_to(package_dir) / "backends"
        (backends / "python").mkdir(parents=True)
        for file in (self.backends / "python").glob("*.*"):
            (backends / "python" / file.name).symlink_to(file)
        (backends / "python" / STUB_NAME).symlink_to(self.stub)
        return backends

    def environment(self, tree: Path) -> dict[str, str]:
        """The environment in which the stub finds this interpreter and its packages, ``microturn`` among them.

        Args:
            tree: where ``link_backends`` made its links.
        """
        return (
            {"GOMP_SPINCOUNT": _SPIN_COUNT}
            | dict(os.environ)
            | {
                # libpython: one of another patch release would load and then fail at `import ssl`.
                # OpenMP: Numba asks for it by a name that the system may not have, and should share torch's anyway.
                "LD_LIBRARY_PATH": _prepend(tree / "lib", "LD_LIBRARY_PATH"),
                # The stub takes the packages of the first python3 that it finds here, and ignores PYTHONPATH.
                "PATH": _prepend(Path(sys.executable).parent, "PATH"),
            }
        )


def find_triton_server() -> TritonServer:
    """Finds the server: a ``tritonserver`` on PATH, else the wheel's.

    Raises:
        ServeError: there is none, or it cannot run this Python.
    """
    binary = _find_binary()
    home = binary.parent.parent
    return TritonServer(binary, home / "backends", _find_stub(home), _find_libpython(sysconfig.get_config_vars()))


def _find_binary() -> Path:
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Path(on_path).resolve()
    package = importlib.util.find_spec("pytriton")  # found, not imported
    if package is not None and package.origin is not None:
        binary = Path(package.origin).resolve().parent / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    raise ServeError(
        "no Triton server found: put tritonserver on PATH, or install the one from PyPI with "
        "'pip install --no-deps nvidia-pytriton==0.7.0'"
    )


def _find_stub(home: Path) -> Path:
    backend = home / "backends" / "python"
    if not (backend / "libtriton_python.so").is_file():
        raise ServeError(
            f"the Triton server in {home} has no Python backend: install one that has, or take it off PATH"
        )
    beside = backend / STUB_NAME
    if beside.is_file():
        built_for = _python_version_of(beside)
        if built_for != _PYTHON_VERSION:
            raise ServeError(
                f"the Triton server in {home} runs models with Python {built_for}, this is {_PYTHON_VERSION}: "
                f"install microturn for Python {built_for}"
            )
        return beside
    stubs = home / "python_backend_stubs"
    stub = stubs / _PYTHON_VERSION / STUB_NAME
    if not stub.is_file():
        versions = ", ".join(sorted((d.name for d in stubs.glob("3.*")), key=lambda name: int(name[2:]))) or "none"
        raise ServeError(
            f"the Triton server in {home} cannot run Python {_PYTHON_VERSION}, only: {versions}; "
            "use Python 3.11 or 3.12"
        )
    return stub


def _python_version_of(stub: Path) -> str:
    """The version a stub was linked for, such as ``3.12``; empty when it does not say."""
    match = re.search(rb"libpython(\d+\.\d+)[a-z]*\.so", stub.read_bytes())
    return match.group(1).decode() if match else ""


def _find_libpython(build: Mapping[str, object]) -> Path:
    """The shared library of this interpreter.

    Args:
        build: the interpreter's ``sysconfig`` variables.
    """
    name = f"libpython{_PYTHON_VERSION}.so.1.0"
    library_dir = Path(str(build.get("LIBDIR") or sys.base_prefix))
    # Debian's are in a directory per architecture; a relocated interpreter remembers where it was built.
    candidates = (library_dir, library_dir / str(build.get("MULTIARCH") or ""), Path(sys.base_prefix) / "lib")
    for directory in candidates:
        if (directory / name).is_file():
            return (directory / name).resolve()
    raise ServeError(
        f"Triton needs {name}, and this Python ({sys.base_prefix}) comes without it: install it "
        f"(Debian: apt install libpython{_PYTHON_VERSION}), or use a Python built with --enable-shared"
    )


def _find_torch_openmp() -> Path:
    """The OpenMP runtime that torch brings along."""
    torch = importlib.util.find_spec("torch")  # found, not imported
    assert torch is not None, "microturn depends on torch"
    assert torch.origin is not None
    return Path(torch.origin).parent / "lib" / "libgomp.so.1"


def _prepend(directory: Path, variable: str) -> str:
    present = os.environ.get(variable)
    return f"{directory}{os.pathsep}{present}" if present else str(directory)
