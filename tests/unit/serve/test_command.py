from __future__ import annotations

import os
import pty

import pytest

from microturn.serve import console
from microturn.serve.command import is_text


@pytest.fixture(params=["terminal", "pipe"])
def stderr(request, monkeypatch):
    """Descriptors of a terminal, or of a pipe, in the place of stdout and stderr."""
    read_end, write_end = pty.openpty() if request.param == "terminal" else os.pipe()
    monkeypatch.setattr(console, "_STDERR", write_end)
    monkeypatch.setattr(console, "_STDOUT", write_end)
    yield request.param, read_end
    os.close(read_end)
    os.close(write_end)


def test_auto_is_text_on_a_terminal_only(stderr):
    kind, _ = stderr
    assert is_text("auto") == (kind == "terminal")
    assert is_text("text")
    assert not is_text("json")


def test_what_to_try_next_is_for_terminals(stderr):
    kind, read_end = stderr
    console.suggest("next")
    console.say("done")
    said = ""
    while "done" not in said:  # a terminal gives what was written in pieces of its own
        said += os.read(read_end, 1000).decode()
    assert said.split() == (["next", "microturn:", "done"] if kind == "terminal" else ["microturn:", "done"])
