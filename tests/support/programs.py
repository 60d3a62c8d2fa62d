"""The programs of README and docs: as they are printed, and run by an interpreter of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]

# What a program needs, by how it names that: a multimodal checkpoint and its server, a server, the fake server, a
# gateway, the edge, or certificates.
IMAGES = "SmolVLM-256M-Instruct"
SOUND = "Qwen2-Audio-7B-Instruct"
SERVER = "localhost:8001"
FAKE = "FakeServer()"
GATEWAY = "localhost:8080"
EDGE = "localhost:8443"
CERTIFICATES = '"ca.crt"'


def programs_of(page: Path) -> list[str]:
    """Its Python programs, in their order."""
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return found


def need_of(program: str) -> str | None:
    """What a program needs, one of the names above."""
    return next((name for name in (IMAGES, SOUND, SERVER, FAKE, GATEWAY, EDGE, CERTIFICATES) if name in program), None)


def programs_for(*needs: str) -> dict[str, str]:
    """The programs of all pages that need one of these, by page and number."""
    return {
        f"{page.name}-{number}": program
        for page in PAGES
        for number, program in enumerate(programs_of(page), 1)
        if need_of(program) in needs
    }


def printed_by(program: str) -> str:
    """Runs a program, which must succeed without a word on stderr; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
