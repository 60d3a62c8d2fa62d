"""Completions over HTTP: what servers without sessions offer, one connection per conversation.

The answer comes whole: its last token is here when the response is, and streaming would only cost the peer time.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

_POLL_S = 0.5
_START_S = 600.0
_ANSWER_S = 600.0


class HttpTalk:
    """A connection that is asked from an event loop; a thread of its own waits for the answers.

    Args:
        port: of loopback.
    """

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
        self._thread = ThreadPoolExecutor(1, "completions")

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends JSON; returns the JSON that comes back.

        Raises:
            RuntimeError: when the server refuses.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._post, path, json.dumps(body))

    def close(self) -> None:
        """Closes the connection."""
        self._thread.shutdown()
        self._connection.close()

    def _post(self, path: str, body: str) -> Any:
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} was answered with {response.status}: {answer[:500].decode(errors='replace')}")
        return json.loads(answer)


def wait_until_healthy(process: subprocess.Popen[Any], port: int) -> None:
    """Waits until a server answers `/health`.

    Raises:
        RuntimeError: when it ends first, or takes minutes.
    """
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(
                f"{process.args!r} ended with exit code {process.returncode}: start it by hand to see why"
            )
        if _is_healthy(port):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"{process.args!r} did not get ready within {_START_S:.0f} s")


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def token_ids(answer: Sequence[Any]) -> list[int]:
    """Ids as a server wrote them."""
    return [int(token_id) for token_id in answer]
