"""Sessions that outlive their server: exported to another one, and saved by SIGTERM for the next."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from microturn.serve.child import free_ports
from microturn.snapshots.file import read_snapshot, write_snapshot
from microturn_client import Client
from support.pipelined import PipelinedStream
from support.raw import Answer, RawStream, ids, turn_request
from support.served import Served, Start, servers_of, sessions_command

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "max_tokens": 8}
GREEDY = {"ignore_eos": True, "max_tokens": 8}
KEY = {"session_key": "ours"}
RESUME = {"resume": True}


@pytest.fixture(scope="module")
def serve_model(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: str) -> Iterator[Start]:
    """Starts the real model behind a supervisor, in float32: what is computed again in other pieces hardly differs.

    With 8-bit weights each product rounds its input: a sampled token may fall out otherwise then, and once one did.
    """
    settings = {"weights": "float32", "kv_dtype": "float32", "kv_tokens": 4096, "max_context": 2048}
    with servers_of(smollm2_dir, partial(tmp_path_factory.mktemp, "run"), **settings) as start:
        yield start


@pytest.fixture(scope="module")
def pair(serve_model: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Path, Served, Path]:
    """Two servers, each with its admin socket."""
    sockets = [tmp_path_factory.mktemp("admin") / "admin.sock" for _ in range(2)]
    ports = free_ports(2)
    peers = ["--set=peers=" + ",".join(f"127.0.0.1:{port}" for port in ports), "--set=moves_per_minute=0"]
    one, other = (
        serve_model("--admin-socket", str(socket), "--peer-port", str(port), *peers)
        for socket, port in zip(sockets, ports, strict=True)
    )
    one.wait_until_ready(120)
    other.wait_until_ready(120)
    return one, sockets[0], other, sockets[1]


def same(one: Answer, other: Answer) -> bool:
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert len(one.token_ids) > 3
    return (one.token_ids, one.text, one.status["context_len"]) == (
        other.token_ids,
        other.text,
        other.status["context_len"],
    )


# ---- from one server to another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_session_goes_on_identically_on_another_server(
    pair: tuple[Served, Path, Served, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    one, one_socket, other, other_socket = pair
    session_id = f"talk-{options['max_tokens'] + options.get('temperature', 0)}"
    with RawStream(one.address) as here, RawStream(other.address) as there:
        opening = {"max_tokens": 4, **{name: value for name, value in options.items() if name != "max_tokens"}}
        assert here.ask(session_id, start=True, options=opening | KEY, text_input=b"The fox said").error is None
        here.ask(session_id, options={"max_tokens": 0} | KEY, text_input=b" that the ele")  # half a word
        exported = sessions_command(one_socket, "export", session_id, tmp_path / "talk")
        assert exported.returncode == 0, exported.stderr
        assert (tmp_path / "talk").stat().st_mode & 0o777 == 0o600
        assert sessions_command(other_socket, "import", tmp_path / "talk").returncode == 0

        assert there.ask(session_id, start=True, options=dict(RESUME), input_ids=ids()).code == "PERMISSION_DENIED"
        texts = (b"phant was", b"", b" So they")
        for number, text in enumerate(texts):
            expected = here.ask(session_id, options=options | KEY, text_input=text)
            start: dict[str, Any] = {"start": True} if number == 0 else {}
            again = there.ask(session_id, **start, options=options | KEY | (RESUME if start else {}), text_input=text)
            assert same(expected, again)
        for stream in (here, there):
            assert stream.ask(session_id, end=True, options=dict(KEY), input_ids=ids()).error is None


def test_with_its_kv_a_session_computes_nothing_again_on_another_server(
    pair: tuple[Served, Path, Served, Path], tmp_path: Path
) -> None:
    one, one_socket, other, other_socket = pair
    with RawStream(one.address) as here, RawStream(other.address) as there:
        prompt = ids(*range(1000, 1400))
        assert here.ask("kv", start=True, options=dict(SAMPLED), input_ids=prompt).error is None
        exported = sessions_command(one_socket, "export", "kv", tmp_path / "talk", "--kv")
        assert exported.stdout == f"kv: 408 tokens and the KV of 407 in {tmp_path}/talk\n"
        assert (tmp_path / "talk").stat().st_mode & 0o777 == 0o600
        imported = sessions_command(other_socket, "import", tmp_path / "talk")
        assert imported.stdout.startswith("kv: 408 tokens and the KV of 407; clients go on")
        for number in range(3):
            start: dict[str, Any] = {"start": True} if number == 0 else {}
            expected = here.ask("kv", options=dict(SAMPLED), text_input=b" and then")
            again = there.ask("kv", **start, options=SAMPLED | (RESUME if start else {}), text_input=b" and then")
            assert same(expected, again)
            assert again.status["usage"] == expected.status["usage"]
            assert again.status["usage"]["computed_tokens"] < 12
        for stream in (here, there):
            assert stream.ask("kv", end=True, input_ids=ids()).error is None


def test_a_session_is_moved_to_another_server(pair: tuple[Served, Path, Served, Path]) -> None:
    one, one_socket, other, _ = pair
    with RawStream(one.address) as here, RawStream(other.address) as there:
        prompt = ids(*range(1000, 1400))
        assert here.ask("moved", start=True, options=GREEDY | KEY, input_ids=prompt).error is None
        moved = sessions_command(one_socket, "move", "moved")
        assert moved.stdout.startswith("moved: 408 tokens and the KV of 407 to 127.0.0.1:"), moved.stderr
        refused = here.ask("moved", options=GREEDY | KEY, text_input=b" and then")
        assert refused.code == "UNAVAILABLE"
        assert "[route=" in str(refused.error)
        again = there.ask("moved", start=True, options=GREEDY | KEY | RESUME, text_input=b" and then")
        assert again.status["usage"]["computed_tokens"] < 12
        # And back, since its client comes here.
        closed = here.ask("moved", start=True, end=True, options=KEY | RESUME, input_ids=ids())
        assert closed.status["context_len"] == again.status["context_len"]
        assert there.ask("moved", options=GREEDY | KEY, text_input=b" and then").error is not None


def test_sessions_are_listed(pair: tuple[Served, Path, Served, Path]) -> None:
    one, socket, *_ = pair
    with RawStream(one.address) as stream:
        stream.ask(815, start=True, options={"max_tokens": 0}, input_ids=ids(1, 2, 3))
        listed = json.loads(sessions_command(socket, "list", "--json").stdout)
        (session,) = [session for session in listed if session["id"] == 815]
        assert (session["context_len"], session["state"], session["num_turns"]) == (3, "parked", 1)
        assert "815" in sessions_command(socket, "list").stdout
        stream.ask(815, end=True, input_ids=ids())


@pytest.mark.parametrize("trouble", ["a flipped bit", "a truncated file", "another model"])
def test_what_cannot_be_imported_is_refused_in_words(
    pair: tuple[Served, Path, Served, Path], tmp_path: Path, trouble: str
) -> None:
    one, one_socket, other, other_socket = pair
    path = tmp_path / "talk"
    with RawStream(one.address) as stream:
        stream.ask(99, start=True, options={"max_tokens": 0}, input_ids=ids(1, 2, 3))
        assert sessions_command(one_socket, "export", "99", path, "--move").returncode == 0
        assert stream.ask(99, input_ids=ids(4)).code == "NOT_FOUND"
    content = path.read_bytes()
    if trouble == "another model":
        snapshot = read_snapshot(path)
        write_snapshot(path, replace(snapshot, header=replace(snapshot.header, model_fingerprint="ab" * 16)))
    else:
        cut = len(content) - 5 if trouble == "a truncated file" else len(content)
        path.write_bytes(bytes([*content[:20], content[20] ^ 1, *content[21:cut]]))
    refused = sessions_command(other_socket, "import", path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("microturn: error: ")
    assert ("another model" in refused.stderr) == (trouble == "another model")
    assert refused.stderr.count("\n") == 1
    with RawStream(other.address) as stream:
        assert stream.ask(99, start=True, options=dict(RESUME), input_ids=ids(4)).code == "NOT_FOUND"


# ---- from a server to its successor --------------------------------------------------------------------------------


def test_sessions_survive_a_restart(serve_model: Start, tmp_path: Path) -> None:
    """A worker restarted and turns went on as if nothing had happened: here they go on as they would have."""
    saved = ("--snapshot-dir", str(tmp_path / "saved"), "--grace-s", "20")
    first = serve_model(*saved)
    first.wait_until_ready(120)
    prompts = [b"The sea is", b"A garden in", b"My brother", b"Once upon a", b"The rain"]
    before = {}
    with RawStream(first.address) as stream:
        for number, prompt in enumerate(prompts):
            options = (SAMPLED if number % 2 else GREEDY) | {"turn": 0, "session_key": f"key {number}"}
            before[number] = stream.ask(f"s{number}", start=True, options=options, text_input=prompt)
            assert before[number].error is None
    with PipelinedStream(first.address) as stream:
        endless = {"max_tokens": 2000, "ignore_eos": True, "session_key": "key 0"}
        pending = stream.send(turn_request("s0", options=endless, input_ids=ids(5, 6)))
        assert pending.has_begun.wait(30)
        stopped_s = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert pending.wait().code == "UNAVAILABLE"
    assert first.wait_for_exit() == 0
    assert time.monotonic() - stopped_s < 35  # the grace time, and what a machine may be slow
    assert "microturn: saved 5 sessions, 5 of them with their KV" in first.said
    files = sorted((tmp_path / "saved").iterdir())
    assert [file.suffix for file in files] == [".snapshot"] * 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}

    second = serve_model("--snapshot-dir", str(tmp_path / "saved"), "--grace-s", "300")
    second.wait_until_ready(120)
    with (
        Client(second.address) as client,
        client.session(session_id="s4", session_key="key 4", resume=True) as session,
    ):
        session.append(" falls on the")
        assert session.context_len > before[4].status["context_len"]
    with RawStream(second.address) as stream:
        # What would have been without a restart: the same turns of a session that is new.
        for number, prompt in enumerate(prompts[:4]):
            key = {"session_key": f"key {number}"}
            resumed = {"start": True, "options": {"max_tokens": 8} | key | RESUME, "text_input": b" and then"}
            wrong = stream.ask(f"s{number}", start=True, options={**RESUME, **KEY}, input_ids=ids())
            assert wrong.code == "PERMISSION_DENIED"
            if number == 3:  # its last answer never arrived, and is asked for again
                options = SAMPLED | {"turn": 0} | key
                again = stream.ask("s3", start=True, options=options, text_input=prompt)
                assert again.status is not None
                assert again.status["replayed"]
                assert same(before[3], again)
            answer = stream.ask(f"s{number}", **resumed)
            seed = before[number].status["seed"]
            options = (SAMPLED if number % 2 else GREEDY) | {"seed": seed}
            twin = stream.ask(f"twin {number}", start=True, options=options, text_input=prompt)
            assert same(before[number], twin)
            goes_on = stream.ask(f"twin {number}", options={"max_tokens": 8}, text_input=b" and then")
            assert same(answer, goes_on)
            assert answer.status["usage"] == goes_on.status["usage"]
    assert [file.suffix for file in sorted((tmp_path / "saved").iterdir())] == [".claimed"] * 5

    with PipelinedStream(second.address) as stream:
        request = turn_request("new", start=True, options={"max_tokens": 2000, "ignore_eos": True}, input_ids=ids(5))
        assert stream.send(request).has_begun.wait(30)
        second.process.send_signal(signal.SIGTERM)
        second.wait_for_line("microturn: stopping")
        second.process.send_signal(signal.SIGTERM)  # whoever asks twice does not want to wait for a turn to end
        assert second.wait_for_exit() == 0


def test_a_model_that_saves_no_sessions_is_not_asked_to(serve: Start, tmp_path: Path) -> None:
    served = serve("--snapshot-dir", str(tmp_path / "saved"))
    assert served.wait_for_exit() == 1
    assert "--snapshot-dir: the model of this repository saves no sessions" in served.said[-1]
