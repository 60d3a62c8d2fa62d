"""Tests of the log: a JSON object per line, and who logs waits for nobody."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from microturn.telemetry import log_lines
from microturn.telemetry.log_lines import LogThread

log = logging.getLogger("microturn.test")


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_a_line_with_its_fields() -> None:
    stream = io.StringIO()
    lines = LogThread(stream)
    log.info("%d sessions", 3, extra={"fields": {"session": "a\n\x1b[2J", "context_len": 4}})
    log.debug("not this")
    lines.close()
    (line,) = written(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "microturn.test",
        "event": "3 sessions",
        "session": "a\n\x1b[2J",
        "context_len": 4,
    }
    assert "\x1b" not in stream.getvalue()


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    lines = LogThread(stream)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("a turn failed")
    lines.close()
    (line,) = written(stream)
    assert line["level"] == "error"
    assert line["traceback"].endswith("ValueError: no")


def test_an_argument_is_read_when_it_is_logged() -> None:
    stream = io.StringIO()
    lines = LogThread(stream)
    pages = [1]
    log.info("pages %s", pages)
    pages.append(2)
    lines.close()
    assert written(stream)[0]["event"] == "pages [1]"


class Stuck(io.StringIO):
    """A pipe that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        assert self.goes_on.wait(30)
        return super().write(text)


def test_who_logs_does_not_wait_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_MAX_WAITING", 10)
    stream = Stuck()
    lines = LogThread(stream)
    for number in range(30):
        log.info("%d", number)
    assert 19 <= lines.num_dropped <= 20, "one may be on its way already"
    stream.goes_on.set()
    lines.close()
    assert len(written(stream)) == 30 - lines.num_dropped
