"""The client as a user gets it: installed into an empty environment, from there imported, type-checked and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "sample_user_program.py"


def run(*command: str | Path, cwd: Path, timeout_s: float = 300) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the client, without any extra, and what that asks for."""
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", directory / "venv", cwd=directory)
    python = directory / "venv" / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(python, *install, "--constraint", ROOT / "constraints.txt", ROOT / "client", cwd=directory)
    return python


def test_it_takes_no_torch_and_no_server(python: Path, tmp_path: Path) -> None:
    program = "import importlib.metadata as m; print(*(d.name.lower() + '=' + d.version for d in m.distributions()))"
    installed = dict(item.split("=") for item in run(python, "-c", program, cwd=tmp_path).split())
    assert {"microturn-client", "grpcio", "numpy", "protobuf"} <= installed.keys()
    assert installed.keys().isdisjoint(
        {"torch", "transformers", "microturn", "starlette", "uvicorn", "nvidia-pytriton", "tritonclient"}
    )
    assert int(installed["numpy"].split(".")[0]) < 2, "Triton's Python backend aborts on text otherwise"
    assert len(installed) < 9, installed


def test_a_users_program_is_sound_for_a_strict_type_checker(python: Path, tmp_path: Path) -> None:
    checker = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", tmp_path)
    said = run(*checker, "--config-file", "", PROGRAM, cwd=tmp_path)
    assert said == "Success: no issues found in 1 source file\n"
    slips = [
        ("session.append(given", "session.append(3.5"),
        ('"max_tokens": 4, "deadline', '"max_token": 4, "deadline'),
        ("return told_end(event)", "return event.status"),
        ('overflow="error"', 'overflow="eror"'),
    ]
    for right, wrong in slips:
        text = PROGRAM.read_text()
        assert right in text
        (tmp_path / "slip.py").write_text(text.replace(right, wrong))
        with pytest.raises(AssertionError, match="Found 1 error in 1 file"):
            run(*checker, "--config-file", "", "slip.py", cwd=tmp_path)


def test_a_users_program_runs(python: Path, tmp_path: Path) -> None:
    said = run(python, "-W", "error", "-X", "dev", PROGRAM, cwd=tmp_path).splitlines()
    assert said[0] == "fake fake 512 1"
    assert said[-1] == "closed"
    assert "mend it: FAILED_PRECONDITION the session is closed: open another one" in said
