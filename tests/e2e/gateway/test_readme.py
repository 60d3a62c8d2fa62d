"""The programs of README and docs that need a gateway run as they are printed."""

from __future__ import annotations

import re

import pytest

from support.programs import GATEWAY, printed_by, programs_for

PROGRAMS = programs_for(GATEWAY)
KEY = "the gateway's token, if it has one"


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_program_runs_and_prints_something(gateway: str, token: str, program: str) -> None:
    assert KEY in program
    printed = printed_by(program.replace(GATEWAY, gateway).replace(KEY, token))
    assert re.search(r"\n\d\d tokens were there already\n$", printed)
