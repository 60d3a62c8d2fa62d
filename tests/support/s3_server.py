"""A server that speaks S3, on loopback, whose trouble a test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "snapshots"


@dataclass
class S3Server:
    """A server with a bucket.

    Attributes:
        url: its endpoint.
        trouble: is called with the method and path of each request, before it is served; may wait. Where it returns
            "refuse", the answer is an error; with "lose", it is served, and the connection ends without an answer.
        requests: method and path of each.
    """

    url: str = ""
    trouble: Callable[[str, str], str | None] | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What boto3 needs to find it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@contextmanager
def s3_with_bucket() -> Iterator[S3Server]:
    """Serves a bucket until the block ends. Boto3 finds it in the environment, also in processes that are started."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield server


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serves until the block ends."""
    server = S3Server()
    serve = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()  # as a storage decides on a condition and writes at once

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        server.requests.append((method, path))
        said = None if server.trouble is None else server.trouble(method, path)
        if said == "refuse":
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        with one_at_a_time:
            answer = list(serve(environ, start_response))
        if said == "lose":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("as if the network had gone")
        return answer

    listening = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    listening.daemon_threads = True
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
