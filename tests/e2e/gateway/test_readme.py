"""The programs of the gateway's README run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.programs import printed_by, programs_of

README = Path(__file__).parents[3] / "client" / "microturn_gateway" / "README.md"
KEY = "the gateway's token, if it has one"


@pytest.mark.parametrize("program", programs_of(README))
def test_the_program_runs_and_prints_something(gateway: str, token: str, program: str) -> None:
    assert "localhost:8080" in program
    printed = printed_by(program.replace("localhost:8080", gateway).replace(KEY, token))
    assert re.search(r"\n\d\d tokens were there already\n$", printed)
