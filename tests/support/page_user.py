"""What somebody does on the gateway's page."""

from __future__ import annotations

import json
from typing import Any

from support.chromium import Page

STATE = "document.getElementById('state').textContent"


def come(page: Page, address: str) -> None:
    """Opens the page and waits until it is connected."""
    page.open(address)
    page.wait_for(f"{STATE} === 'ready' && document.activeElement.id === 'input'")


def ask(page: Page, text: str) -> None:
    """Types a question, and asks."""
    page.click("#input")
    type_and_ask(page, text)


def type_and_ask(page: Page, text: str) -> None:
    """Types where the focus is, waits until all of it has landed, and asks.

    Nothing can be asked while another session opens, which the state does not say yet when a dialog has just closed.
    """
    page.type(text)
    page.wait_for(f"document.getElementById('landed').textContent === {json.dumps(text)}")
    page.press("Enter")


def hear_all(page: Page, num_exchanges: int) -> None:
    """Waits until so many questions are answered, and compared where they are."""
    page.wait_for(f"document.querySelectorAll('.exchange').length === {num_exchanges} && {STATE} === 'ready'", 180)


def text(page: Page, selector: str) -> str:
    """What the last such element says."""
    return str(page.value(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).textContent"))


def number(page: Page, selector: str) -> int:
    """The number that it begins with."""
    return int(text(page, selector).split()[0].replace(",", ""))


def set_field(page: Page, field: str, value: Any) -> None:
    """Fills a field of the settings."""
    name = "checked" if isinstance(value, bool) else "value"
    page.value(f"void (document.getElementById('{field}').{name} = {json.dumps(value)})")
