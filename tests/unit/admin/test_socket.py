"""Tests of admin.socket_server, admin.client and admin.address: a real socket."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from microturn.admin.address import socket_address
from microturn.admin.client import ask
from microturn.admin.socket_server import AdminSocket
from microturn.errors import InternalError, InvalidArgument, NotFound, Unavailable


class Server:
    """Answers requests with themselves, and some in other ways."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def answer(self, request: Mapping[str, Any]) -> Any:
        match request.get("op"):
            case "missing":
                raise NotFound("there is none", position=3)
            case "broken":
                raise ZeroDivisionError("by zero")
            case "slow":
                assert self.may_answer.wait(10)
        return dict(request)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Deeper than an address of a Unix socket may be long."""
    directory = tmp_path / ("deep" * 20) / ("er" * 40)
    directory.mkdir(parents=True)
    return directory / "admin.sock"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def listening(path: Path, server: Server) -> Iterator[Path]:
    """The path, with a server that listens there."""
    admin = AdminSocket(path, server.answer)
    yield path
    admin.close()


@pytest.fixture
def say(listening: Path) -> Callable[[bytes], list[Any]]:
    """Sends bytes, ends the stream, returns all replies."""

    def say(data: bytes) -> list[Any]:
        with socket_address(listening) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(address)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as replies:
                return [json.loads(line) for line in replies]

    return say


def test_a_request_is_answered(listening: Path) -> None:
    assert len(str(listening)) > 108
    assert ask(listening, "echo", 10, text="ключ\n", number=1.5) == {"op": "echo", "text": "ключ\n", "number": 1.5}


def test_only_its_user_may_open_it(listening: Path) -> None:
    assert stat.S_IMODE(listening.stat().st_mode) == 0o600


def test_an_error_comes_back_as_what_it_was(listening: Path) -> None:
    with pytest.raises(NotFound, match="there is none"):
        ask(listening, "missing", 10)
    with pytest.raises(InternalError, match="by zero"):
        ask(listening, "broken", 10)
    assert ask(listening, "echo", 10) == {"op": "echo"}


def test_a_connection_takes_one_request_after_the_other(say: Callable[[bytes], list[Any]]) -> None:
    assert say(b'{"op": "a"}\n{"op": "missing"}\n{"op": "b"}\n') == [
        {"result": {"op": "a"}},
        {"error": {"code": "NOT_FOUND", "message": "there is none"}},
        {"result": {"op": "b"}},
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"[1]\n",
        b"\xff\xfe\n",
        b'{"op": "a"}',
        b"[" * 50_000 + b"\n",
        b'{"a": "' + b"a" * 70_000 + b'"}\n',
    ],
    ids=["empty", "no JSON", "no object", "no UTF-8", "no end", "a nest", "too long"],
)
def test_what_is_no_request_is_refused(say: Callable[[bytes], list[Any]], line: bytes) -> None:
    reply = say(line)[0]
    assert reply["error"]["code"] == "INVALID_ARGUMENT"


def test_who_is_slow_keeps_nobody_waiting(listening: Path, server: Server) -> None:
    results: list[Any] = []
    slow = threading.Thread(target=lambda: results.append(ask(listening, "slow", 10)))
    slow.start()
    assert ask(listening, "echo", 10) == {"op": "echo"}
    assert results == []
    server.may_answer.set()
    slow.join(10)
    assert results == [{"op": "slow"}]


def test_who_waits_long_enough_gives_up(listening: Path, server: Server) -> None:
    with pytest.raises(Unavailable, match="no answer from a server"):
        ask(listening, "slow", 0.05)
    server.may_answer.set()


def test_a_closed_socket_leaves_nothing(path: Path, server: Server) -> None:
    AdminSocket(path, server.answer).close()
    assert not path.exists()
    with pytest.raises(Unavailable, match="No such file"):
        ask(path, "echo", 10)


def test_a_socket_that_a_dead_server_left_is_replaced(path: Path, server: Server) -> None:
    with socket_address(path) as address, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address)
    assert path.is_socket()
    admin = AdminSocket(path, server.answer)
    assert ask(path, "echo", 10) == {"op": "echo"}
    admin.close()


def test_a_socket_on_which_another_server_listens_is_left_alone(listening: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot listen on .*: Address already in use"):
        AdminSocket(listening, Server().answer)
    assert ask(listening, "echo", 10) == {"op": "echo"}


def test_a_file_in_its_place_is_left_alone(path: Path, server: Server) -> None:
    path.write_text("precious")
    with pytest.raises(InvalidArgument, match="cannot listen"):
        AdminSocket(path, server.answer)
    assert path.read_text() == "precious"


def test_a_directory_that_is_not_there_is_said(tmp_path: Path, server: Server) -> None:
    with pytest.raises(InvalidArgument, match=r"admin_socket: cannot listen on .*: No such file or directory"):
        AdminSocket(tmp_path / "none" / "admin.sock", server.answer)
