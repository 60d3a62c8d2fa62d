"""Tests of load_tests.bench.http_completions and llama_cpp, against a real HTTP server that says what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from load_tests.bench.http_completions import HttpTalk
from load_tests.bench.llama_cpp import LlamaCppServer


class Echo(BaseHTTPRequestHandler):
    """Answers with as many tokens as asked, all of them the slot's number; refuses slot 1."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"asked": asked, "tokens": [asked.get("id_slot")] * asked.get("n_predict", 0)}).encode()
        self.send_response(500 if asked.get("id_slot") == 1 else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


async def test_what_is_posted_arrives_and_the_answer_comes_back(port: int) -> None:
    talk = HttpTalk(port)
    for number in range(2):
        assert (await talk.post("/x", {"prompt": [number]}))["asked"] == {"prompt": [number]}
    talk.close()


async def test_conversations_have_slots_of_their_own_and_give_them_back(port: int) -> None:
    server = LlamaCppServer(port, 1)
    talk = server.open()
    await talk.turn([5, 6], 3)
    await talk.turn([7], 1)
    assert talk._history == [5, 6, 0, 0, 0, 7, 0]
    with pytest.raises(IndexError):
        server.open()
    await talk.close()
    await server.open().close()


async def test_a_refusal_is_no_answer(port: int) -> None:
    server = LlamaCppServer(port, 2)
    first, second = server.open(), server.open()
    with pytest.raises(RuntimeError, match="answered with 500"):
        await second.turn([1], 1)
    await first.close()
    await second.close()
