"""The programs of client/README.md run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[3] / "client" / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("program", "printed"),
    list(
        zip(
            PROGRAMS,
            [r"( \d+){12}\n15 tokens of context\n", r"( \d+){8}length 24\.6 ms\n", r"( \d+){500}\n"],
            strict=True,
        )
    ),
)
def test_a_program_runs_as_printed(server, program, printed):
    assert "localhost:8001" in program
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program.replace("localhost:8001", server.address)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(printed, done.stdout)


def test_a_server_that_is_not_there_is_said_so():
    [program] = [program for program in PROGRAMS if "Unavailable" in program]
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:8001", "127.0.0.1:1")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "the server is not there\n"
