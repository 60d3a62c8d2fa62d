"""Generates the client for threads from the client for asyncio; `make check` compares.

    python client/generate_sync.py            writes the files
    python client/generate_sync.py --check    says which are out of date; exit status 1 if any is

Why not `unasync` or `unasyncd`: the first leaves docstrings as they are, and ours name the classes; the second brings
libcst and six more packages. All that differs by more than a word is in `_connection.py` and `_stream.py` of either.
"""

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "microturn_client"
NAMES = {
    "_aio.py": "_sync.py",
    "_aio_session.py": "_sync_session.py",
    "_aio_turns.py": "_sync_turns.py",
    "_aio_turn.py": "_sync_turn.py",
    "_aio_beat.py": "_sync_beat.py",
}
HEADER = "# Generated from {} by client/generate_sync.py: change that file, then run `make client-sync`.\n"
WORDS = [
    (r"(?s)    # ---- asyncio alone ----\n.*?    # ---- both ----\n", ""),
    (r"an async iter", "an iter"),
    (r"an ``async with``", "a ``with``"),
    (r"the tasks of one event loop", "threads"),
    (r"tasks of one event loop", "threads"),
    (r"task of its own", "thread of its own"),
    (r" Not awaited itself; iterate over", " Iterate over"),
    (r"for asyncio", "for threads"),
    (r"import asyncio\n", ""),
    (r"asyncio\.sleep", "time.sleep"),
    (r"\b(async|await) ", ""),
    (r"\b_aio\b", "_sync"),
    (r"\b_aio_", "_sync_"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(?=(enter|exit|next)__)", "__"),
    (r"\baiter\(", "iter("),
    (r"for (\w+) in (.+):\n +yield \1\n", r"yield from \2\n"),
]


def generated(source: Path) -> str:
    """The text for threads, with its imports sorted and its lines broken as everywhere."""
    text = source.read_text()
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    text = HEADER.format(source.name) + text
    for command in (["check", "--select=I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={PACKAGE / NAMES[source.name]}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    texts = {target: generated(PACKAGE / source) for source, target in NAMES.items()}
    stale = [target for target, text in texts.items() if text != (PACKAGE / target).read_text()]
    if "--check" in sys.argv[1:]:
        sys.exit(f"out of date: {', '.join(stale)}; run `make client-sync`" if stale else None)
    for target in stale:
        (PACKAGE / target).write_text(texts[target])
