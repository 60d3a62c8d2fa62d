"""The page is plain files of its own: nothing comes from elsewhere, and what its script looks for is there."""

from __future__ import annotations

import re
from pathlib import Path

import microturn_gateway

ROOT = Path(__file__).parents[3]
PAGE = Path(microturn_gateway.__file__).parent / "page"
FILES = {file.name: file.read_text() for file in PAGE.iterdir()}


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        assert "style=" not in text, f"{name}: the page's policy allows no styles in place"


def test_every_element_that_the_scripts_name_is_there() -> None:
    named = set(re.findall(r'\bat\("([\w-]+)"\)', "".join(FILES.values())))
    there = set(re.findall(r'id="([\w-]+)"', FILES["index.html"]))
    assert len(named) > 20
    assert named <= there


def test_every_file_that_is_asked_for_is_there_and_no_other() -> None:
    asked_for = re.findall(r'(?:href|src)="([^"]+)"', FILES["index.html"])
    asked_for += re.findall(r'from "\./([^"]+)"', "".join(FILES.values()))
    assert {"index.html", *asked_for} == FILES.keys()


def test_every_field_has_a_label() -> None:
    fields = re.findall(r'<(?:textarea|input) id="([\w-]+)"', FILES["index.html"])
    assert {"input", "token", "instructions", "temperature"} <= set(fields)
    assert all(f'<label for="{field}"' in FILES["index.html"] for field in fields)


def test_every_error_that_has_words_is_one_of_the_gateways_or_the_pages_own() -> None:
    explained = set(re.findall(r"^  (\w+): ", FILES["errors.js"], re.MULTILINE))
    of_page = {"unreachable", "not_taken", "broken"}
    documented = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "gateway.md").read_text()))
    documented |= {code.lower() for code in re.findall(r"`([A-Z_]+)`", (ROOT / "client" / "PROTOCOL.md").read_text())}
    assert of_page < explained
    assert explained - of_page <= documented


def test_files_are_short() -> None:
    assert all(text.count("\n") <= 300 for text in FILES.values())
