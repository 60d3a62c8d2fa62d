from __future__ import annotations

import json
import re
import time

import pytest

from microturn.serve.log_text import as_text


def line(level: str = "info", logger: str = "microturn.sessions", event: str = "session opened", **fields) -> str:
    head = {"time": "2026-11-22T05:20:35.088+00:00", "level": level, "logger": logger, "event": event}
    return json.dumps(head | fields)


def without_time(text: str) -> str:
    assert re.match(r"\d\d:\d\d:\d\d ", text), text
    return text[9:]


def test_a_line_is_time_of_day_logger_event_and_fields():
    text = as_text(line(session="4711", origin="new", context_len=2))
    assert without_time(text) == "sessions: session opened  session=4711 origin=new context_len=2"


def test_the_time_is_the_local_one(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")  # two hours east
    time.tzset()
    try:
        assert as_text(line()).startswith("07:20:35 ")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("level", "expected"),
    [("info", "loading: ready"), ("warning", "WARNING loading: ready"), ("error", "ERROR loading: ready")],
)
def test_a_level_shows_unless_it_is_info(level, expected):
    assert without_time(as_text(line(level, "microturn.engine.loading", "ready"))) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("größer", "größer"),
        ("two words", '"two words"'),
        ("größer als", '"größer als"'),
        ("a=b", '"a=b"'),
        ("", '""'),
        (0.25, "0.25"),
        (True, "true"),
        ([1, 2], "[1, 2]"),
        ("\x1b[2J", '"\\u001b[2J"'),
        ("\x9b2J", '"\\u009b2J"'),
    ],
)
def test_a_value_is_quoted_where_it_would_not_be_one_word(value, expected):
    assert without_time(as_text(line(event="e", field=value))) == f"sessions: e  field={expected}"


def test_a_text_of_a_client_does_not_steer_the_terminal():
    text = as_text(line(event="new\nline\x1b[2J", **{"na me\x07": 1}, traceback="a\x1b[2J"))
    assert without_time(text) == 'sessions: new\\nline\\u001b[2J  "na me\\u0007"=1\n    a\\u001b[2J'


def test_a_traceback_has_lines_of_its_own():
    text = as_text(line("error", event="a step failed", traceback="Traceback\n  File\nValueError: x"))
    assert without_time(text) == "ERROR sessions: a step failed\n    Traceback\n      File\n    ValueError: x"


@pytest.mark.parametrize(
    "other",
    [
        "loading layers",
        'W1121 11:51:39.283243 5466 pinned_memory_manager.cc:273] "Unable to allocate"',
        "{not JSON",
        '{"event": "of another program"}',
        line(logger="x").replace("2026-11-22T", "yesterday "),
        line().replace('"microturn.sessions"', "1"),
        line(traceback=1),
        "{}",
        '{"a": ' + "[" * 100_000,
        "",
    ],
)
def test_what_is_no_line_of_the_model_stays_as_it_is(other):
    assert as_text(other) == other
