"""README and docs: links lead to files, named files exist, and every program is run by some test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.programs import PAGES, need_of, programs_of

ROOT = Path(__file__).parents[2]
MARKDOWN = [*PAGES, ROOT / "client" / "PROTOCOL.md", ROOT / "tests" / "README.md"]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_the_repository_lead_to_files(page: Path) -> None:
    """Anchors, and links between pages of the site, are checked by `make docs`."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).is_file()]


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`([a-z_]+(?:/\w+)*/(?:\w+\.\w+)?)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 40
    roots = ROOT, ROOT / "backend_src" / "microturn"
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


def test_pages_that_sources_name_exist() -> None:
    folders = ("backend_src", "client", "deploy", "load_tests", "tests")
    sources = [path for folder in folders for end in ("py", "yaml", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    sources = [path for path in sources if "build" not in path.parts]
    pattern = re.compile(r"\b((?:docs|client|deploy|load_tests|tests)/[\w/-]+\.md)\b")
    named = {name for path in sources for name in pattern.findall(path.read_text())}
    assert len(named) > 4
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_rooms_are_those_of_the_package() -> None:
    package = ROOT / "backend_src" / "microturn"
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    rooms = {room.name for room in package.iterdir() if (room / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)) == rooms


def test_every_program_is_run_by_a_test() -> None:
    """Tests of tests/e2e run all programs that need something which `need_of` knows."""
    assert all(need_of(program) for page in PAGES for program in programs_of(page))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
