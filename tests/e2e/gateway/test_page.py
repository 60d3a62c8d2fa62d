"""Somebody uses the page, in a real browser, before the real server, with the command as it is typed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chromium import Page, chromium

# Where the pictures go: to look at, and for the README.
SHOTS = os.environ.get("MICROTURN_SCREENSHOTS")


@pytest.fixture(scope="module")
def address(server: str) -> Iterator[str]:
    """The page's, from `microturn gateway`, which ends in peace."""
    command = [sys.executable, "-m", "microturn.cli", "gateway", "--server", server, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("ready at http://127.0.0.1:")
        yield said.split()[2]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")


@pytest.fixture(scope="module")
def page(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        page.resize(1000, 640)
        page.open(address)
        yield page
        assert page.errors == []


def shoot(page: Page, name: str) -> None:
    picture = page.screenshot()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
    if SHOTS is not None:
        (Path(SHOTS) / f"{name}.png").write_bytes(picture)


def number(page: Page, element: str) -> int:
    return int(page.value(f"document.getElementById('{element}').textContent").split()[0])


def test_somebody_types_is_answered_and_interrupts(page: Page) -> None:
    page.wait_for("document.activeElement.id === 'input' && !document.activeElement.disabled")
    assert page.value("document.getElementById('model').textContent") == "smollm2-135m"

    # What is typed lands while it is typed.
    for num_landed, part in enumerate(("Please write", " a short", " poem ab"), start=1):
        page.type(part)
        page.wait_for(f"document.querySelectorAll('#landed span').length >= {num_landed}")
    assert number(page, "context") > 5
    page.type("out the sea in the mo")
    # A slip is taken back, from the context too.
    for _ in range(2):
        page.press("Backspace")
    page.type("evening.")
    page.wait_for("document.getElementById('landed').textContent.endsWith('evening.')")
    page.press("Enter")
    assert page.value("document.getElementById('input').value") == ""
    page.wait_for("document.querySelector('#messages .assistant')?.textContent.length > 60")
    assert (
        page.value("document.querySelector('#messages .user').textContent")
        == "Please write a short poem about the sea in the evening."
    )

    # Escape stops it where it stands.
    page.press("Escape")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    page.wait_for("document.querySelector('#messages .assistant').classList.contains('cut')")
    heard = page.value("document.querySelector('#messages .assistant').textContent")
    assert page.value("document.getElementById('interrupt').disabled")

    # And the talk goes on: what is typed next follows what was heard.
    before = number(page, "context")
    page.type("And now one about ")
    page.wait_for("document.querySelectorAll('#landed span').length >= 1")
    page.type("mountains, please.")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#messages .assistant')[1]?.textContent.length > 80")
    assert page.value("document.querySelector('#messages .assistant').textContent") == heard
    page.press("Escape")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    assert number(page, "context") > before
    assert page.value("document.getElementById('kv').textContent") == "in place"
    assert "within 200 ms" in page.value("document.getElementById('chart').ariaLabel")
    page.type("Thank you, that was ")
    page.wait_for("document.querySelectorAll('#landed span').length >= 1")
    shoot(page, "light")


def test_it_is_dark_where_the_system_is(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    light = page.value(ground)
    page.prefer("dark")
    page.wait_for(f"{ground} !== '{light}'")
    shoot(page, "dark")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (320, 568)])
def test_it_fits_a_phone(page: Page, width: int, height: int) -> None:
    page.resize(width, height, is_phone=True)
    page.wait_for(f"innerWidth === {width}")
    assert page.value("document.documentElement.scrollWidth") <= width
    for element in ("input", "send", "interrupt", "chart", "talk"):
        edges = page.value(
            f"(r => [r.left, r.top, r.right, r.bottom])(document.getElementById('{element}').getBoundingClientRect())"
        )
        assert 0 <= edges[0] < edges[2] <= width, element
        assert 0 <= edges[1] < edges[3] <= height, element
    assert page.value("document.getElementById('talk').clientHeight") > 80
    shoot(page, f"phone-{width}")
    page.prefer("light")
