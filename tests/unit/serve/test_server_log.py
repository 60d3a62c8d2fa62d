from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from microturn.serve.errors import ServeError
from microturn.serve.server_log import MODEL_DIED, ServerLog, find_reason, says_why

HEAD = "E1121 11:51:39.635452 5466 "
CUDA = 'W1121 11:51:39.283243 5466 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            HEAD + "model_lifecycle.cc:642] \"failed to load 'streaming_llm' version 1: Internal: ValueError: no config"
            '.json in x: give --model\\n\\nAt:\\n  /x/model.py(7): initialize\\n"',
            "ValueError: no config.json in x: give --model",
        ),
        (
            HEAD + "model_lifecycle.cc:642] \"failed to load 'streaming_llm' version 1: Internal: Stub process "
            "'streaming_llm_0_0' is not healthy.\"",
            "the model process died while it loaded the model (out of memory?)",
        ),
        (
            HEAD + "main.cc:245] \"failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use \"",
            "Socket '127.0.0.1:1' already in use",
        ),
        (
            HEAD + "model_repository_manager.cc:1460] \"Poll failed for model directory 'm': failed to read text\"",
            "failed to read text",
        ),
        (
            "/x/tritonserver: error while loading shared libraries: libz.so.1: cannot open shared object file",
            "error while loading shared libraries: libz.so.1: cannot open shared object file",
        ),
    ],
)
def test_the_reason_is_found_among_other_complaints(line, reason):
    lines = [CUDA, line, "error: creating server: Internal - failed to load all models", "Usage: nothing"]
    assert find_reason(lines) == reason


def test_without_a_known_reason_the_last_line_stands():
    assert find_reason(["Segmentation fault"]) == "Segmentation fault"
    assert find_reason([]) == ""


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ValueError: no config.json in x", True),
        ("unrecognized option '--no-such-flag'", True),
        (MODEL_DIED, False),
        ("what():  boost::interprocess::lock_exception", False),
        ("CudaDriverHelper has not been initialized.", False),
        ("Stub process 'streaming_llm_0_0' is not healthy.", False),
        ("it ended with code 134", False),
        ("", False),
    ],
)
def test_a_process_that_died_has_given_no_reason(reason, expected):
    """It may go well the next time, whereas what is wrong for a reason in words stays wrong."""
    assert says_why(reason) == expected


@pytest.fixture
def output():
    """A pipe's end to write to, and the other end as the server's output."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as output, os.fdopen(write_end, "w", buffering=1) as server:
        yield server, output


def shown(capfd) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_while_starting_only_the_models_own_lines_are_shown(output, capfd):
    server, stream = output
    with ServerLog(None) as log:
        reader = log.follow(stream)
        server.write(
            f"{CUDA}\nloading layers\nAt:\n  model.py(1): <module>\nnext\nUsage: tritonserver [options]\n  -h\n"
        )
        server.close()
        reader.join(5)
    assert shown(capfd) == ["loading layers", "next"]


def test_once_ready_all_lines_are_shown(output, capfd):
    server, stream = output
    with ServerLog(None) as log:
        reader = log.follow(stream)
        log.show_server_lines(True)
        server.write(f"{CUDA}\n\nhello\n")
        server.close()
        reader.join(5)
    assert shown(capfd) == [CUDA, "hello"]


JSON_LINE = '{"time": "2026-11-22T05:20:35.088+00:00", "level": "info", "logger": "microturn.x", "event": "loaded"}'


@pytest.mark.parametrize(("is_text", "expected"), [(True, r"\d\d:\d\d:35 x: loaded"), (False, re.escape(JSON_LINE))])
def test_the_models_json_lines_are_text_where_that_is_wanted(output, capfd, is_text, expected):
    server, stream = output
    with ServerLog(None, is_text=is_text) as log:
        reader = log.follow(stream)
        log.show_server_lines(True)
        server.write(f"{CUDA}\n{JSON_LINE}\n")
        server.close()
        reader.join(5)
    cuda, json_line = shown(capfd)
    assert cuda == CUDA
    assert re.fullmatch(expected, json_line)


def test_a_log_directory_gets_everything_and_the_terminal_nothing(output, capfd, tmp_path: Path):
    server, stream = output
    with ServerLog(tmp_path / "new", is_text=True) as log:
        reader = log.follow(stream)
        server.write(f"{CUDA}\n{JSON_LINE}\nhello\n")
        server.close()
        reader.join(5)
        assert log.failure() == "hello"
    assert (tmp_path / "new" / "triton.log").read_text() == f"{CUDA}\n{JSON_LINE}\nhello\n"
    assert shown(capfd) == []


def test_a_full_disk_does_not_end_the_log(output, capfd, tmp_path: Path):
    """A server whose output nobody reads dies of its next line, and so does the one that is started in its place."""
    server, stream = output
    full = tmp_path / "triton.log"
    full.symlink_to("/dev/full")
    with ServerLog(tmp_path) as log:
        reader = log.follow(stream)
        server.write("one\ntwo\n")
        server.flush()
        told, until_s = "", time.monotonic() + 10
        while "two" not in told and time.monotonic() < until_s:
            time.sleep(0.01)
            told += capfd.readouterr().err
        assert "the log goes to stderr while it cannot be written: No space left on device" in told
        assert reader.is_alive()
        server.write("three\n")
        server.close()
        reader.join(5)
        assert log.failure() == "three"
    assert shown(capfd) == ["three"]


def test_bytes_that_are_no_text_do_not_end_the_log(output, capfd):
    server, stream = output
    with ServerLog(None) as log:
        reader = log.follow(stream)
        server.buffer.write(b"\xff\xfe\nstill here\n")
        server.close()
        reader.join(5)
    assert shown(capfd)[-1] == "still here"


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match="cannot write a log"):
        ServerLog(tmp_path / "file")
