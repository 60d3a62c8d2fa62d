"""The programs of the gateway's README run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "client" / "microturn_gateway" / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
KEY = "the gateway's token, if it has one"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_and_prints_something(gateway: str, token: str, program: str) -> None:
    assert "localhost:8080" in program
    program = program.replace("localhost:8080", gateway).replace(KEY, token)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"\n\d\d tokens were there already\n$", result.stdout)
