"""The page for people who do not see it, or who have no mouse: by axe-core and by what the keyboard reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.axe import violations
from support.chromium import Page, chromium
from support.gateway_command import gateway_command
from support.page_user import STATE, ask, come, hear_all, set_field, text, type_and_ask

LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
# Everything that the log of whole answers is told, from when the page is opened.
LISTEN = """
    addEventListener("DOMContentLoaded", () => {
        window.heard = [];
        const added = ({ addedNodes }) => [...addedNodes].map((node) => node.textContent);
        const observer = new MutationObserver((records) => heard.push(...records.flatMap(added)));
        observer.observe(document.getElementById("heard"), { childList: true, characterData: true, subtree: true });
    });
"""


@pytest.fixture(scope="module")
def page(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """With one question answered, and compared."""
    with gateway_command(server) as address, chromium(tmp_path_factory.mktemp("profile")) as page:
        page.resize(1280, 800)
        page.run_before(LISTEN)
        come(page, address)
        page.click("#open-settings")
        set_field(page, "max-tokens", 20)
        page.click("#settings button.main")
        ask(page, "What is a fern?")
        hear_all(page, 1)
        yield page
        assert page.errors == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("dialog", [None, "open-settings", "open-table"])
def test_axe_finds_nothing(page: Page, dialog: str | None, width: int, scheme: str) -> None:
    page.resize(width, 844, is_phone=width < 800)
    page.prefer(scheme)
    page.wait_for(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")
    if dialog is not None:
        page.click(f"#{dialog}")
    assert violations(page) == []
    if dialog is not None:
        page.press("Escape")
    page.resize(1280, 800)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_where_something_is_wrong(page: Page, scheme: str) -> None:
    page.prefer(scheme)
    page.value(
        "void import('/errors.js').then(({inWords}) => {"
        " document.getElementById('trouble').hidden = document.getElementById('reconnect').hidden = false;"
        " document.getElementById('trouble-words').textContent = inWords({code: 'broken'}); })"
    )
    page.wait_for("document.getElementById('trouble-words').textContent !== ''")
    assert violations(page) == []
    page.value("void (document.getElementById('trouble').hidden = true)")


def test_screen_readers_hear_whole_answers(page: Page) -> None:
    session, request = page.value("heard")
    assert session == f"{text(page, '.session .text')} ({text(page, '.session .remark')})"
    assert request == f"The same as a request per turn: {text(page, '.request .remark')}"
    # And nothing of it as deltas.
    assert page.value("document.getElementById('messages').closest('[aria-live], [role=log], [role=status]')") is None
    assert "First word of a request per turn: the last took " in page.value(
        "document.getElementById('chart').ariaLabel"
    )


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Page) -> None:
    page.value("void document.getElementById('new').focus()")
    reached = []
    for _ in range(20):
        place = page.value(
            "(({ id, matches }) => [id, getComputedStyle(document.activeElement).outlineStyle])(document.activeElement)"
        )
        if place[0] in (name for name, _ in reached):
            break
        reached.append(place)
        page.press("Tab")
    names = [name for name, _ in reached if name]
    wanted = page.value(
        "[...document.querySelectorAll('body > :not(dialog) :is(button, textarea):not(:disabled)')]"
        ".filter((element) => element.checkVisibility()).map(({ id }) => id)"
    )
    assert set(wanted) <= set(names)
    assert (
        names.index("new")
        < names.index("talk")
        < names.index("input")
        < names.index("send")
        < names.index("open-table")
    )
    assert all(outline == "solid" for name, outline in reached if name)


def test_a_dialog_is_used_with_the_keyboard_and_gives_the_focus_back(page: Page) -> None:
    page.value("void document.getElementById('open-settings').focus()")
    page.press("Enter")
    page.wait_for("document.activeElement.id === 'instructions'")
    page.type("Be brief.")
    for wanted in ("temperature", "top-p", "max-tokens", "compare"):
        page.press("Tab")
        page.wait_for(f"document.activeElement.id === '{wanted}'")
    page.press(" ")
    for _ in range(2):
        page.press("Tab")
    page.press("Enter")
    page.wait_for(f"document.activeElement.id === 'open-settings' && {STATE} === 'ready'")
    for _ in range(2):
        page.press("Tab")
    page.wait_for("document.activeElement.id === 'input'")
    type_and_ask(page, "And moss?")
    hear_all(page, 2)
    assert page.value("document.querySelectorAll('.answer.request').length") == 1
