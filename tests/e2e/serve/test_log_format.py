"""What ``microturn serve`` prints for a user at a terminal, and for a program that reads its pipes."""

from __future__ import annotations

import functools
import json
import re
import signal
from collections.abc import Callable

import pytest

from microturn_client import Client
from support.served import Served, Start

# A server that has printed all it will, by its options and whether that is on a terminal; the same when asked again.
Talked = Callable[..., Served]
TEXT_LINE = re.compile(r"\d\d:\d\d:\d\d ([A-Z]+ )?\w+: .+")


@pytest.fixture(scope="module")
def talked(start_tiny: Start) -> Talked:
    return functools.cache(
        lambda *arguments, on_terminal: after_its_life(start_tiny(*arguments, on_terminal=on_terminal))
    )


def after_its_life(served: Served) -> Served:
    """With one session."""
    served.wait_until_ready(120)
    with Client(served.address) as client, client.session() as session:
        session.append("Hello.")
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0
    assert not any("Loading weights" in line for line in served.said)
    return served


@pytest.mark.parametrize(("on_terminal", "arguments"), [(True, ()), (False, ("--log-format=text",))])
def test_lines_are_text_on_a_terminal_or_where_asked_for(talked: Talked, on_terminal, arguments) -> None:
    said = talked(*arguments, on_terminal=on_terminal).said
    assert not [line for line in said if line.startswith("{")]
    lines = [line for line in said if TEXT_LINE.fullmatch(line)]
    assert any(" loading: warmed up " in line for line in lines)
    assert any(re.search(r" sessions: session opened  session=\S+ origin=new ", line) for line in lines)


@pytest.mark.parametrize(("on_terminal", "arguments"), [(False, ()), (True, ("--log-format=json",))])
def test_lines_are_json_in_a_pipe_or_where_asked_for(talked: Talked, on_terminal, arguments) -> None:
    said = talked(*arguments, on_terminal=on_terminal).said
    assert not [line for line in said if TEXT_LINE.fullmatch(line)]
    events = [json.loads(line)["event"] for line in said if line.startswith("{")]
    assert any(event.startswith("warmed up ") for event in events)
    assert "session opened" in events


def test_a_terminal_shows_what_to_try_next(talked: Talked) -> None:
    served = talked(on_terminal=True)
    said = served.said
    (ready,) = [number for number, line in enumerate(said) if line.startswith("ready in ")]
    assert f"  microturn chat {served.address}" in said[ready:]
    assert f"  microturn health 127.0.0.1:{served.health_port}" in said[ready:]
    assert f"  curl {served.metrics_url}" in said[ready:]
    assert "Ctrl-C stops the server." in said[ready:]


def test_a_program_reads_one_line_on_stdout(talked: Talked) -> None:
    said = talked(on_terminal=False).said
    assert [line for line in said if not line.startswith(("{", "microturn: ", "ready in "))] == []
