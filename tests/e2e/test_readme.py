"""The programs of README and docs that need a server run as they are printed; `gateway` and `deploy` run the others."""

from __future__ import annotations

import pytest

from support.programs import FAKE, SERVER, printed_by, programs_for

PROGRAMS = programs_for(SERVER, FAKE)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_program_runs_and_prints_something(server: str, program: str) -> None:
    assert len(printed_by(program.replace(SERVER, server)).split()) >= 3
