"""Tests of serve.saving: what the terminal is told of a drain, and what of turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from microturn.admin.socket_server import AdminSocket
from microturn.errors import Unavailable
from microturn.serve.saving import is_busy, save_sessions


def drain(path: Path, answer: Any) -> bool:
    admin = AdminSocket(path, answer)
    try:
        return save_sessions(path, 3)
    finally:
        admin.close()


def test_what_was_saved_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def answer(request: Any) -> Any:
        asked.append(request)
        return {"saved": 4, "failed": 0, "with_kv": 3, "moved": 0}

    assert drain(tmp_path / "s", answer)
    assert asked == [{"op": "drain", "timeout_s": 3}]
    assert capfd.readouterr().err == "microturn: saved 4 sessions, 3 of them with their KV\n"


def test_what_was_lost_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert drain(tmp_path / "s", lambda _: {"saved": 3, "failed": 1, "with_kv": 0, "moved": 0})
    assert capfd.readouterr().err == "microturn: saved 3 sessions, 1 are lost\n"


def test_an_engine_that_cannot_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def answer(_: Any) -> Any:
        raise Unavailable("it has stopped")

    assert not drain(tmp_path / "s", answer)
    assert not save_sessions(tmp_path / "none", 3)
    assert "could not be saved: it has stopped" in capfd.readouterr().err


@pytest.mark.parametrize("says", [True, False])
def test_an_engine_is_busy_unless_it_says_otherwise(tmp_path: Path, says: bool) -> None:
    admin = AdminSocket(tmp_path / "s", lambda request: request == {"op": "is_busy"} and says)
    try:
        assert is_busy(tmp_path / "s") == says
    finally:
        admin.close()
    assert is_busy(tmp_path / "s")
