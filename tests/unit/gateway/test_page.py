"""The page is plain files of its own: nothing comes from elsewhere, and what its script looks for is there."""

from __future__ import annotations

import re
from pathlib import Path

import microturn_gateway

PAGE = Path(microturn_gateway.__file__).parent / "page"
FILES = {file.name: file.read_text() for file in PAGE.iterdir()}


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        assert "style=" not in text, f"{name}: the page's policy allows no styles in place"


def test_every_element_that_the_script_names_is_there() -> None:
    named = set(re.findall(r'\bat\("([\w-]+)"\)', FILES["page.js"]))
    there = set(re.findall(r'id="([\w-]+)"', FILES["index.html"]))
    assert len(named) > 10
    assert named <= there


def test_every_file_that_is_asked_for_is_there() -> None:
    asked_for = re.findall(r'(?:href|src)="([^"]+)"', FILES["index.html"])
    asked_for += re.findall(r'from "\./([^"]+)"', "".join(FILES.values()))
    assert {"page.js", "style.css", "chart.js"} <= set(asked_for) <= FILES.keys()


def test_every_field_has_a_label() -> None:
    fields = re.findall(r'<(?:textarea|input) id="([\w-]+)"', FILES["index.html"])
    assert fields == ["input", "token"]
    assert all(f'<label for="{field}"' in FILES["index.html"] for field in fields)
