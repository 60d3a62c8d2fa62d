"""Every program in a README runs as it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import printed_by, programs_of

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    pytest.param(program, id=f"{name}-{number}")
    for name in ("README.md", "client/README.md")
    for number, program in enumerate(programs_of(ROOT / name), 1)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_and_prints_something(server: str, program: str) -> None:
    assert "localhost:8001" in program or "FakeServer" in program
    assert len(printed_by(program.replace("localhost:8001", server)).split()) >= 3
