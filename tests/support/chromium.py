"""Debian's Chromium without a window, driven by its DevTools protocol over a WebSocket."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from support.needed import needed

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--mute-audio", "--hide-scrollbars"),
)
_WAIT_S = 60.0
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " "), "Backspace": (8, "")}


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Goes to an address and waits for the page."""
        self._call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def value(self, expression: str) -> Any:
        """What an expression is on the page."""
        said = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = _WAIT_S) -> None:
        """Waits until an expression is true.

        Raises:
            AssertionError: it does not become so.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {expression}; {self.errors}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Types into what has the focus, a character at a time."""
        for character in text:
            self._call("Input.insertText", text=character)
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and releases a key."""
        code, text = _KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Scrolls to an element where need be, and clicks into its middle."""
        x, y = self.value(
            f"(element => {{ element.scrollIntoViewIfNeeded(); const box = element.getBoundingClientRect();"
            f" return [box.x + box.width / 2, box.y + box.height / 2]; }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def run_before(self, script: str) -> None:
        """From the next address on, runs a script before those of the page."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Gives the page this many CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """A WebP of what is seen."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="webp", quality=80)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": params}
        if self._session is not None:
            call["sessionId"] = self._session
        self._socket.send(json.dumps(call))
        while True:
            said = json.loads(self._socket.recv(timeout=_WAIT_S))
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                result: dict[str, Any] = said["result"]
                return result
            if said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(said["params"]["exceptionDetails"]["text"])
            if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])


@contextmanager
def chromium(profile_dir: Path) -> Iterator[Page]:
    """A browser with one page, until the block ends."""
    program = needed("chromium", "apt install chromium")
    command = [program, *_FLAGS, f"--user-data-dir={profile_dir}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_address(profile_dir, process), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()


def _address(profile_dir: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens, as it writes into its profile."""
    file, deadline_s = profile_dir / "DevToolsActivePort", time.monotonic() + _WAIT_S
    while not file.exists() or len(file.read_text().split()) < 2:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < deadline_s, "the browser does not listen"
        time.sleep(0.05)
    port, path = file.read_text().split()
    return f"ws://127.0.0.1:{port}{path}"
