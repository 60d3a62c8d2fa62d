"""Somebody uses the page, in a real browser, before the real server, with the command as it is typed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chromium import Page, chromium
from support.gateway_command import gateway_command
from support.page_user import STATE, ask, come, hear_all, number, set_field, text

# Where the pictures go that docs/gateway.md shows: `make page-pictures`.
PICTURES = os.environ.get("MICROTURN_PAGE_PICTURES")
KINDS = ("session", "request")
QUESTIONS = (
    "I have a small garden and no time. What should I plant?",
    "And in the shade?",
    "How often do I water them?",
    "What grows on a balcony?",
)


@pytest.fixture(scope="module")
def address(server: str) -> Iterator[str]:
    with gateway_command(server) as address:
        yield address


@pytest.fixture(scope="module")
def page(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        page.resize(1280, 800)
        come(page, address)
        yield page
        assert page.errors == []


@pytest.fixture
def fresh_page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        yield page


def shoot(page: Page, name: str) -> None:
    picture = page.screenshot()
    assert picture.startswith(b"RIFF")
    assert len(picture) < 150_000
    if PICTURES is not None:
        (Path(PICTURES) / f"page-{name}.webp").write_bytes(picture)


def num_drawn(page: Page, kind: str) -> int:
    """Answers of a kind in the chart."""
    return int(page.value(f"document.querySelectorAll('#chart :is(circle, path).{kind}').length"))


def test_somebody_types_is_answered_and_interrupts(page: Page) -> None:
    assert text(page, "#model") == "smollm2-135m"
    # What is typed lands while it is typed.
    for num_landed, part in enumerate(("Please write", " a short", " poem ab"), start=1):
        page.type(part)
        page.wait_for(f"document.querySelectorAll('#landed span').length >= {num_landed}")
    assert number(page, "#context") > 5
    page.type("out the sea in the mo")
    # A slip is taken back, from the context too.
    for _ in range(2):
        page.press("Backspace")
    page.type("evening.")
    page.wait_for("document.getElementById('landed').textContent.endsWith('evening.')")
    page.press("Enter")
    assert page.value("document.getElementById('input').value") == ""
    page.wait_for("document.querySelector('.session .text').textContent.length > 60")
    assert text(page, ".user") == "Please write a short poem about the sea in the evening."

    # Escape stops it where it stands, and what was not whole is not compared.
    page.press("Escape")
    page.wait_for(f"{STATE} === 'ready' && document.querySelector('.session.cut') !== null")
    heard = text(page, ".session .text")
    assert text(page, ".session .remark").startswith("interrupted")
    assert text(page, ".request .remark").startswith("not sent")
    assert num_drawn(page, "request") == 0
    assert page.value("document.getElementById('interrupt').disabled")

    # And the talk goes on: what is typed next follows what was heard.
    before = number(page, "#context")
    page.type("And now one about ")
    page.wait_for("document.querySelectorAll('#landed span').length >= 1")
    page.type("mountains, please.")
    page.press("Enter")
    # Where the first answer was interrupted decides what this one says, and how long it is.
    page.wait_for("document.querySelectorAll('.session .text')[1].textContent.length > 0")
    assert page.value("document.querySelector('.session .text').textContent") == heard
    page.press("Escape")
    page.wait_for(f"{STATE} === 'ready'")
    assert number(page, "#context") > before
    assert text(page, "#kv") == "in place"


def test_a_new_conversation_knows_nothing_of_the_last_one(page: Page) -> None:
    page.click("#new")
    page.wait_for(f"{STATE} === 'ready'")
    assert page.value("document.querySelectorAll('.exchange').length") == 0
    assert page.value("!document.getElementById('hint').hidden")
    assert page.value("document.activeElement.id") == "input"
    before = number(page, "#context")
    page.type("Hello")
    page.wait_for("document.querySelectorAll('#landed span').length >= 1")
    assert number(page, "#context") < before
    for _ in "Hello":
        page.press("Backspace")
    page.wait_for("document.querySelectorAll('#landed span').length === 0")


def test_the_same_conversation_runs_as_a_request_per_turn(page: Page) -> None:
    page.click("#open-settings")
    set_field(page, "max-tokens", 60)
    page.click("#settings button.main")
    num_before = [num_drawn(page, kind) for kind in KINDS]
    for num_exchanges, question in enumerate(QUESTIONS, start=1):
        ask(page, question)
        hear_all(page, num_exchanges)
        # The same context and the likeliest tokens: the same answer, which is to be seen beside the first.
        session, request = (text(page, f".{kind} .text") for kind in KINDS)
        assert session[:20] == request[:20] != ""
        tops = page.value(
            "[...document.querySelectorAll('.exchange:last-child .answer')].map(({offsetTop: top}) => top)"
        )
        assert tops[0] == tops[1]
        # What the gateway's `usage` says: nothing was kept for the request, and nearly all of the session.
        told = [
            re.search(r"after ([\d,]+) ms with (\d+) of (\d+) tokens", text(page, f".{kind} .remark")) for kind in KINDS
        ]
        (_, session_cached, session_len), (_, request_cached, request_len) = (match.groups() for match in told if match)
        assert session_len == request_len
        assert int(session_cached) > int(session_len) - 20
        assert request_cached == "0"
        assert text(page, "#cached-session") == f"{session_cached} of {session_len}"
        assert text(page, "#cached-request") == f"{request_cached} of {request_len}"
    assert text(page, "#gain").startswith("The session began")
    assert [num_drawn(page, kind) for kind in KINDS] == [num + len(QUESTIONS) for num in num_before]


def test_all_that_was_measured_is_in_a_table(page: Page) -> None:
    page.click("#open-table")
    rows = page.value(
        "[...document.querySelectorAll('#measured tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert {row[0] for row in rows} == {"typed chunk", "streaming session", "request per turn"}
    assert all(int(ms) >= 0 and int(cached) <= int(context) for _, ms, context, cached in rows)
    assert rows[0][0] == "request per turn"
    page.press("Escape")


@pytest.mark.parametrize(("name", "width", "height"), [("desk", 1280, 800), ("phone", 390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_looks_as_in_the_docs(page: Page, name: str, width: int, height: int, scheme: str) -> None:
    page.resize(width, height, is_phone=name == "phone")
    page.prefer(scheme)
    page.wait_for(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) is (scheme == "dark")
    page.wait_for("document.getElementById('chart').querySelector('.beat').getAttribute('x2') > innerWidth / 5")
    shoot(page, f"{name}-{scheme}")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (360, 740), (320, 568)])
def test_it_fits_a_phone(page: Page, width: int, height: int) -> None:
    page.resize(width, height, is_phone=True)
    page.wait_for(f"innerWidth === {width}")
    assert page.value("document.documentElement.scrollWidth") <= width
    for element in ("input", "send", "interrupt", "chart", "talk", "new", "open-settings", "first-request"):
        edges = page.value(
            f"(r => [r.left, r.top, r.right, r.bottom])(document.getElementById('{element}').getBoundingClientRect())"
        )
        assert 0 <= edges[0] < edges[2] <= width, element
        assert 0 <= edges[1] < edges[3] <= height, element
    assert page.value("document.getElementById('talk').clientHeight") > 80
    page.resize(1280, 800)


def test_settings_change_how_answers_are_made(page: Page) -> None:
    num_exchanges = page.value("document.querySelectorAll('.exchange').length")
    page.click("#open-settings")
    set_field(page, "instructions", "Answer in Latin.")
    page.press("Escape")  # which changes nothing
    page.wait_for("document.getElementById('instructions').value === ''")

    page.click("#open-settings")
    set_field(page, "instructions", "Answer in one short sentence.")
    set_field(page, "max-tokens", 5)
    set_field(page, "compare", False)
    page.click("#settings button.main")
    # Another beginning: the conversation is told to another session, and what is typed stands behind all of it.
    page.wait_for(f"{STATE} === 'ready'")
    before = number(page, "#context")
    ask(page, "Thank you.")
    hear_all(page, num_exchanges + 1)
    assert number(page, "#context") > before
    assert page.value("document.querySelector('.exchange:last-child .request')") is None
    assert len(text(page, ".session .text").split()) <= 5
    assert page.value("document.getElementById('trouble').hidden")


def test_an_interrupt_stops_the_request_too(page: Page) -> None:
    page.click("#open-settings")
    set_field(page, "max-tokens", 60)
    set_field(page, "compare", True)
    page.click("#settings button.main")
    ask(page, "Tell me a long story about a fox.")
    page.wait_for(f"{STATE} === 'comparing'")
    page.press("Escape")
    page.wait_for(f"{STATE} === 'ready'")
    assert text(page, ".request .remark") == "stopped"
    assert text(page, ".session .remark").startswith("first word after")


def test_a_token_is_asked_for_until_it_is_the_right_one(fresh_page: Page, gateway: str, token: str) -> None:
    fresh_page.open(f"http://{gateway}")
    for typed, words in (("another", "not the gateway’s token"), (token, "")):
        fresh_page.wait_for("document.activeElement.id === 'token'")
        fresh_page.type(typed)
        fresh_page.press("Enter")
        fresh_page.wait_for(f"document.getElementById('door-words').textContent.includes('{words}')")
    fresh_page.wait_for(f"{STATE} === 'ready'")
    ask(fresh_page, "Hello.")
    fresh_page.wait_for("document.querySelector('.request .text')?.textContent.length > 0")


def test_what_is_spoken_lands_as_it_is_recognized(fresh_page: Page, address: str) -> None:
    """The recognizer is the browser's: here a script speaks for it, since this machine has no microphone."""
    fresh_page.run_before("""
        window.webkitSpeechRecognition = class extends EventTarget {
            start() { window.recognizer = this; }
            stop() { this.dispatchEvent(new Event("end")); }
            abort() { this.stop(); }
            hear(...texts) {
                const results = texts.map((transcript) => [{ transcript }]);
                this.dispatchEvent(Object.assign(new Event("result"), { results }));
            }
        };
        delete window.SpeechRecognition;
    """)
    come(fresh_page, address)
    fresh_page.click("#microphone")
    assert fresh_page.value("document.getElementById('microphone').ariaPressed") == "true"
    for said in (["What should"], ["What could I plant"], ["What could I plant", " in the shade?"]):
        fresh_page.value(f"void recognizer.hear(...{said})")
        fresh_page.wait_for(f"document.getElementById('landed').textContent === '{''.join(said)}'")
    fresh_page.click("#send")
    hear_all(fresh_page, 1)
    assert text(fresh_page, ".user") == "What could I plant in the shade?"
    assert fresh_page.value("document.getElementById('microphone').ariaPressed") == "false"
    assert fresh_page.value("document.getElementById('input').value") == ""
    assert fresh_page.errors == []
