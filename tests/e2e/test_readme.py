"""Every program in a README runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    pytest.param(program, id=f"{name}-{number}")
    for name in ("README.md", "client/README.md")
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL), 1)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_and_prints_something(server: str, program: str) -> None:
    assert "localhost:8001" in program or "FakeServer" in program
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program.replace("localhost:8001", server)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert len(result.stdout.split()) >= 3
