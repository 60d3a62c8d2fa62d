"""The product stays easy to find one's way in: few rooms, and no long modules."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "backend_src" / "microturn"
MAX_ROOMS = 14
MAX_LINES = 300


def test_rooms_are_few_and_nothing_else_lies_beside_them() -> None:
    # model_repository is a link: what Triton loads, not a package.
    entries = [path for path in SERVER.iterdir() if path.name != "__pycache__" and not path.is_symlink()]
    # Git leaves behind what it ignores where a room has gone.
    rooms = sorted(path.name for path in entries if path.is_dir() and any(path.rglob("*.py")))
    assert len(rooms) <= MAX_ROOMS, rooms
    assert {path.name for path in entries if path.is_file()} == {
        "__init__.py",
        "cli.py",
        "errors.py",
        "py.typed",
        "settings.py",
    }


def test_modules_are_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for package in (SERVER, ROOT / "client" / "microturn_client", ROOT / "client" / "microturn_gateway")
        for path in package.rglob("*.py")
    }
    too_long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not too_long, f"split them along what they know: {too_long}"
