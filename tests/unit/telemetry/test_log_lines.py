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
    assert 10 <= lines.num_dropped <= 20, "as many again may be on their way already"
    stream.goes_on.set()
    lines.close()
    assert len(written(stream)) == 30 - lines.num_dropped


def test_where_nobody_reads_closing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_PATIENCE_S", 0.1)
    stream = Stuck()
    lines = LogThread(stream)
    log.info("unread")
    lines.close()
    assert lines._records.thread.is_alive()
    stream.goes_on.set()
    lines._records.thread.join(30)
    assert [line["event"] for line in written(stream)] == ["unread"]


def test_what_is_grave_is_written_at_once_and_what_was_said_before_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_PAUSE_S", 3600.0)
    stream = Told()
    lines = LogThread(stream)
    log.info("a session opened")
    log.warning("a file could not be read")
    assert stream.was_flushed.wait(30)
    assert [line["event"] for line in written(stream)] == ["a session opened", "a file could not be read"]
    lines.close()


def test_lines_that_cannot_be_written_are_counted_and_the_next_are_written() -> None:
    stream = Broken()
    lines = LogThread(stream)
    log.warning("lost")
    assert stream.has_failed.wait(30)
    log.warning("written")
    lines.close()
    assert lines.num_dropped == 1
    assert [line["event"] for line in written(stream)] == ["written"]


class Told(io.StringIO):
    """Says when something has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.was_flushed = threading.Event()

    def flush(self) -> None:
        super().flush()
        self.was_flushed.set()


class Broken(io.StringIO):
    """A pipe that breaks once."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = threading.Event()

    def write(self, text: str) -> int:
        if not self.has_failed.is_set():
            self.has_failed.set()
            raise BrokenPipeError
        return super().write(text)


def test_who_logs_and_the_thread_survive_what_makes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    lines = LogThread(stream)
    unfit = logging.makeLogRecord({"msg": "%d sessions", "args": ("three",)})
    lines._handler.handle(unfit)  # not by the logger: pytest listens, too, and raises
    log.info("no line", extra={"fields": {("a", "b"): 1}})
    log.info("a line")
    lines.close()
    assert [line["event"] for line in written(stream)] == ["a line"]
    assert capsys.readouterr().err.count("--- Logging error ---") == 2
