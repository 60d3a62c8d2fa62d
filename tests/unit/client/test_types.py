"""What a strict type checker makes of a program that uses the client."""

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "mistyped_program.py"
ROOT = Path(__file__).parents[3]


def test_a_strict_type_checker_finds_wrong_values_and_misspelt_options(tmp_path):
    expected = {
        (number, found[1])
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if (found := re.search(r"# wrong: ([\w-]+)", line))
    }
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path), str(PROGRAM)],
        env={"MYPYPATH": str(ROOT / "client"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    errors = re.findall(rf"{PROGRAM.name}:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    assert {(int(number), code) for number, code in errors} == expected, done.stdout + done.stderr
    assert len(expected) > 15
