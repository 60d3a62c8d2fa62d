"""The tests' own README names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_guards_a_known_failure_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 40
    missing = [name for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert not missing


def test_every_failure_has_a_test_or_a_reason() -> None:
    known, ours = (TESTS / "README.md").read_text().split("## Known failures")[1].split("## Our own failures")
    (_header, *known_rows), (_header, *our_rows) = (
        re.findall(r"^\| (B[\d–B]+)? ?\| (.+?) \| (.+) \|$", table, re.MULTILINE) for table in (known, ours)
    )
    assert {f"B{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16)} <= {
        row[0] for row in known_rows
    }
    assert all("::test_" in tests or tests.startswith("does not apply") for _, _, tests in [*known_rows, *our_rows])
    assert len(our_rows) > 30
