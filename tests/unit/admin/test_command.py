"""Tests of admin.command: ``microturn sessions`` against an engine's real socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from microturn.admin.command import SOCKET_NAME
from microturn.admin.operations import Operations
from microturn.admin.socket_server import AdminSocket
from microturn.cli import main
from microturn.serve.run_directory import RunDirectory
from support.threads import ThreadedDriver, starting_engines


@pytest.fixture
def driver() -> Iterator[ThreadedDriver]:
    with starting_engines() as start:
        driver = start()
        driver.ask(4711, [5, 6], start=True, max_tokens=2).wait()
        yield driver


@pytest.fixture
def socket(driver: ThreadedDriver, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "of the engine"
    admin = AdminSocket(path, Operations(driver.engine).answer)
    yield path
    admin.close()


def sessions(*arguments: str | Path, socket: Path) -> int:
    return main(["sessions", *map(str, arguments), "--socket", str(socket)])


def test_the_table_shows_what_lives(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions("list", socket=socket) == 0
    head, row = capsys.readouterr().out.splitlines()
    columns = ["ID", "CONTEXT", "KV", "DEVICE", "HOST", "DISK", "INPUTS", "STATE", "AGE", "LAST", "TURN"]
    assert head.split() == columns
    # A page of four tokens is 64 bytes in the model that is a hash; four ids are 16.
    assert row.split()[:11] == ["4711", "4", "device", "64", "B", "-", "-", "16", "B", "parked", "0"]
    assert row.endswith(" s ago")


def test_an_id_does_not_reach_the_terminal_as_control_characters(
    driver: ThreadedDriver, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.ask("\x1b[2Jboo", [5], start=True).wait()
    assert sessions("list", socket=socket) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2Jboo" in out


def test_the_list_is_also_for_programs(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions("list", "--json", socket=socket) == 0
    (session,) = json.loads(capsys.readouterr().out)
    assert (session["id"], session["context_len"]) == (4711, 4)


def test_a_session_is_exported_and_imported(
    socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sessions("export", "4711", "a-file", "--move", socket=socket) == 0
    assert capsys.readouterr().out == f"4711: 4 tokens in {tmp_path}/a-file\n"
    assert sessions("list", "--json", socket=socket) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert sessions("import", "a-file", socket=socket) == 0
    assert capsys.readouterr().out.startswith("4711: 4 tokens; clients go on")


def test_kv_goes_along_where_it_is_asked_for(socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions("export", "4711", tmp_path / "a-file", "--move", "--kv", socket=socket) == 0
    assert sessions("import", tmp_path / "a-file", socket=socket) == 0
    exported, imported = capsys.readouterr().out.splitlines()
    assert exported == f"4711: 4 tokens and the KV of 3 in {tmp_path}/a-file"
    assert imported.startswith("4711: 4 tokens and the KV of 3; clients go on")


@pytest.mark.parametrize(
    "arguments", [["export", "1", "a-file"], ["import", "none"], ["export", "4711", "f", "--ttl-s", "nan"]]
)
def test_a_refusal_is_one_line_and_an_exit_code(
    socket: Path,
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sessions(*arguments, socket=socket) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("microturn: error: ")
    assert captured.err.count("\n") == 1


def test_without_a_server_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions("list", socket=tmp_path / "none") == 1
    assert "no answer from a server" in capsys.readouterr().err


def test_the_one_server_that_runs_is_found(
    driver: ThreadedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr("microturn.serve.run_directory.SHARED_MEMORY", shared)
    assert main(["sessions", "list"]) == 1
    assert "no server of yours has an admin socket here" in capsys.readouterr().err
    with RunDirectory.create(tmp_path) as (run, _):
        admin = AdminSocket(run.path / SOCKET_NAME, Operations(driver.engine).answer)
        assert main(["sessions", "list", "--json"]) == 0
        assert "4711" in capsys.readouterr().out
        with RunDirectory.create(tmp_path) as (second, _):
            other = AdminSocket(second.path / SOCKET_NAME, Operations(driver.engine).answer)
            assert main(["sessions", "list"]) == 1
            assert "several servers run here" in capsys.readouterr().err
            other.close()
        admin.close()


def test_it_needs_no_heavy_import(socket: Path) -> None:
    script = f"""
import sys
from microturn.cli import main
main(["sessions", "list", "--socket", {str(socket)!r}])
print(sorted({{"torch", "numpy", "grpc", "transformers", "tritonclient", "safetensors"}} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True).stdout
    assert said.splitlines()[-1] == "[]"
    assert "4711" in said
