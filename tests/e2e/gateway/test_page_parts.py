"""Parts of the page that need no model: the chart and its scale, what is said of errors, and the microphone's button.

They run in the browser; behind the gateway there is no server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.serve.child import free_ports
from support.chromium import Page, chromium
from support.gateway import running_gateway
from support.page_user import STATE, text


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_gateway(f"127.0.0.1:{free_ports(1)[0]}") as address:
        yield f"http://{address}/"


@pytest.fixture(scope="module")
def quiet_address(address: str) -> str:
    """Under this name the gateway refuses the page, which does not try again: nothing else is said meanwhile."""
    return address.replace("127.0.0.1", "this-machine.localhost")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    """A tab where nothing is open yet."""
    with chromium(tmp_path) as browser:
        browser.resize(1280, 800)
        yield browser


@pytest.fixture
def page(browser: Page, address: str) -> Page:
    browser.open(address)
    return browser


def called(page: Page, module: str, function: str, *arguments: Any) -> Any:
    """What a function of one of the page's modules says."""
    given = ", ".join(json.dumps(argument) for argument in arguments)
    return page.value(f"import('/{module}.js').then((module) => module.{function}({given}))")


def test_an_outlier_does_not_flatten_the_rest(page: Page) -> None:
    steady = [40, 55, 48, 60, 52]
    assert called(page, "scale", "robustMost", [steady], 50) == 60
    assert called(page, "scale", "robustMost", [[*steady, 9000]], 50) == 3 * 52
    assert called(page, "scale", "robustMost", [[9000, 40]], 50) == 3 * 40
    # A series that grows is no outlier, and neither is a slower one beside a faster one.
    grows = [100 * step for step in range(1, 11)]
    assert called(page, "scale", "robustMost", [grows, steady], 50) == 1000
    assert called(page, "scale", "robustMost", [[], []], 250) == 250


@pytest.mark.parametrize(
    ("most", "marks"),
    [(250, [0, 100, 200, 300]), (1000, [0, 250, 500, 750, 1000]), (8192, [0, 2500, 5000, 7500, 10000])],
)
def test_axes_have_round_marks(page: Page, most: int, marks: list[int]) -> None:
    assert called(page, "scale", "marks", most) == marks


def test_the_chart_marks_what_is_beyond_its_scale_and_says_so(page: Page) -> None:
    points = [{"kind": "session", "ms": 50 + step, "contextLen": 100 * step} for step in range(1, 6)]
    points += [{"kind": "request", "ms": 100 * step, "contextLen": 100 * step} for step in range(1, 6)]
    points += [{"kind": "session", "ms": 9000, "contextLen": 600}]
    page.value(
        "import('/chart.js').then(({Chart}) =>"
        f" new Chart(document.getElementById('chart')).show({json.dumps(points)}))"
    )
    texts = page.value("[...document.querySelectorAll('#chart text')].map((text) => text.textContent)")
    assert texts == ["0", "200", "400", "600", "ms", "0", "200", "400", "600", "tokens of context"]
    beyond = "[...document.querySelectorAll('#chart .beyond')].map((mark) => mark.textContent)"
    assert page.value(beyond) == ["9000 ms at 600 tokens"]
    described = page.value("document.getElementById('chart').ariaLabel")
    assert "First word of a request per turn: the last took 500 ms at 500 tokens." in described
    assert "1 beyond the scale." in described
    # All of it is within the picture.
    assert page.value(
        "[...document.querySelectorAll('#chart :is(circle, path, text)')].every((mark) => {"
        " const [all, one] = [document.getElementById('chart'), mark].map((e) => e.getBoundingClientRect());"
        " return all.left <= one.left && one.right <= all.right && all.top <= one.top && one.bottom <= all.bottom; })"
    )


def test_a_server_that_is_not_there_is_explained_in_words(page: Page) -> None:
    page.wait_for("!document.getElementById('trouble').hidden")
    assert text(page, "#trouble-words") == (
        "The model’s server does not answer. It may be starting; otherwise see whether it runs. Trying again …"
    )
    assert page.value("!document.getElementById('reconnect').hidden && document.getElementById('send').disabled")
    assert page.value(STATE) == "connecting"


def test_a_place_that_is_not_ours_is_not_tried_again(browser: Page, quiet_address: str) -> None:
    browser.open(quiet_address)
    browser.wait_for("!document.getElementById('trouble').hidden")
    assert text(browser, "#trouble-words").startswith("Without a token the gateway serves this machine only.")
    assert "Trying again" not in text(browser, "#trouble-words")
    assert browser.value(STATE) == "not connected"


def test_an_error_without_words_here_is_told_in_the_gateways(page: Page) -> None:
    said = called(page, "errors", "inWords", {"code": "invalid_value", "message": "'temperature' must be at least 0"})
    assert said == "The gateway says: 'temperature' must be at least 0."


@pytest.mark.parametrize("has_speech", [True, False])
def test_the_microphone_is_there_where_the_browser_recognizes_speech(
    browser: Page, address: str, has_speech: bool
) -> None:
    if not has_speech:
        browser.run_before("delete window.webkitSpeechRecognition; delete window.SpeechRecognition;")
    browser.open(address)
    assert browser.value("document.getElementById('microphone').checkVisibility()") is has_speech


def test_a_microphone_that_does_not_hear_is_explained_in_words(browser: Page, quiet_address: str) -> None:
    """The browser's own recognition: it has neither a microphone here nor its service."""
    browser.open(quiet_address)
    browser.wait_for("!document.getElementById('trouble').hidden")
    browser.click("#microphone")
    words = "document.getElementById('trouble-words').textContent"
    browser.wait_for(f"/microphone|speech recognition|Nothing was heard/.test({words})")
    browser.wait_for("document.getElementById('microphone').ariaPressed === 'false'")
