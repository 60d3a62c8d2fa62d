"""The programs of a README: as they are printed, and run by an interpreter of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def programs_of(readme: Path) -> list[str]:
    """Its Python programs, in their order."""
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    return found


def printed_by(program: str) -> str:
    """Runs a program, which must succeed without a word on stderr; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
