"""The search on made-up installations; that what it finds runs is shown by the end-to-end tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from microturn.serve import triton_server
from microturn.serve.errors import ServeError
from microturn.serve.triton_server import STUB_NAME, find_triton_server

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def install(home: Path, *, stub_for: str | None = None, wheel_stubs: tuple[str, ...] = ()) -> Path:
    """Lays out a server as a container has it (one stub) or as the wheel has it (a stub per version)."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "tritonserver").touch(mode=0o755)
    (home / "backends" / "python").mkdir(parents=True)
    (home / "backends" / "python" / "libtriton_python.so").touch()
    if stub_for is not None:
        (home / "backends" / "python" / STUB_NAME).write_bytes(f"\x7fELF\0libpython{stub_for}.so.1.0\0".encode())
    for version in wheel_stubs:
        (home / "python_backend_stubs" / version).mkdir(parents=True)
        (home / "python_backend_stubs" / version / STUB_NAME).touch()
    return home


@pytest.fixture
def on_path(monkeypatch):
    def put(home: Path) -> None:
        monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return put


def test_the_wheels_server_is_found_and_linked_without_touching_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    server = find_triton_server()
    assert server.binary.parts[-3:] == ("tritonserver", "bin", "tritonserver")
    assert server.stub.parts[-3:] == ("python_backend_stubs", THIS, STUB_NAME)
    backends = server.link_backends(tmp_path / "tree")
    stub = backends / "python" / STUB_NAME
    assert stub.resolve() == server.stub
    # The path that the backend library's RPATH takes.
    assert (backends / "python" / "../../../../nvidia_pytriton.libs").resolve().is_dir()
    assert not (server.backends / "python" / STUB_NAME).exists()


def test_a_server_on_path_comes_first_and_its_own_stub_is_used(tmp_path, on_path):
    home = install(tmp_path / "triton", stub_for=THIS)
    on_path(home)
    server = find_triton_server()
    assert server.binary == home / "bin" / "tritonserver"
    assert server.link_backends(tmp_path / "tree") == home / "backends"


def test_the_model_process_finds_this_interpreter_first(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/other/lib")
    server = find_triton_server()
    server.link_backends(tmp_path)
    environment = server.environment(tmp_path)
    library_dir, other = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    linked = {file.name: file.resolve().parent.parent.name for file in Path(library_dir).iterdir()}
    assert linked.keys() == {f"libpython{THIS}.so.1.0", "libgomp.so.1.0.0"}
    assert linked["libgomp.so.1.0.0"] == "torch"
    assert other == "/usr/other/lib"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    changed = {name for name in environment if environment[name] != os.environ.get(name)}
    assert changed - {"GOMP_SPINCOUNT"} == {"LD_LIBRARY_PATH", "PATH"}


def test_the_users_own_openmp_settings_stand(tmp_path, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert find_triton_server().environment(tmp_path)["GOMP_SPINCOUNT"] == "77"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert find_triton_server().environment(tmp_path)["GOMP_SPINCOUNT"] == "10000"


def test_without_any_server_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "pytriton", raising=False)
    with pytest.raises(ServeError, match="pip install --no-deps nvidia-pytriton"):
        find_triton_server()


def test_a_server_for_another_python_is_refused(tmp_path, on_path):
    on_path(install(tmp_path, stub_for="3.8"))
    with pytest.raises(ServeError, match=rf"runs models with Python 3\.8, this is {THIS}"):
        find_triton_server()


def test_a_wheel_without_a_stub_for_this_python_is_refused(tmp_path, on_path):
    on_path(install(tmp_path, wheel_stubs=("3.9", "3.10")))
    with pytest.raises(ServeError, match=rf"cannot run Python {THIS}, only: 3\.9, 3\.10"):
        find_triton_server()


def test_a_server_without_a_python_backend_is_refused(tmp_path, on_path):
    home = install(tmp_path)
    (home / "backends" / "python" / "libtriton_python.so").unlink()
    on_path(home)
    with pytest.raises(ServeError, match="no Python backend"):
        find_triton_server()


def test_a_python_without_its_shared_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(triton_server.sysconfig, "get_config_vars", lambda: {"LIBDIR": str(tmp_path / "lib")})
    with pytest.raises(ServeError, match=rf"needs libpython{THIS}\.so\.1\.0.* apt install libpython{THIS}"):
        find_triton_server()


def test_debians_library_directory_is_searched(tmp_path, monkeypatch):
    library = tmp_path / "lib" / "x86_64-linux-gnu" / f"libpython{THIS}.so.1.0"
    library.parent.mkdir(parents=True)
    library.touch()
    build = {"LIBDIR": str(tmp_path / "lib"), "MULTIARCH": "x86_64-linux-gnu"}
    monkeypatch.setattr(triton_server.sysconfig, "get_config_vars", lambda: build)
    assert find_triton_server().libpython == library
