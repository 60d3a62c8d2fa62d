"""A gateway of its own in this process: the real application on a real port, with the settings that a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from microturn_gateway.command import build_server, listen
from microturn_gateway.settings import GatewaySettings

_START_S = 30.0


@contextmanager
def running_gateway(server: str, **settings: Any) -> Iterator[str]:
    """Runs a gateway before a server until the block ends.

    Yields:
        Its `host:port`.
    """
    chosen = GatewaySettings(server=server, port=0, **settings)
    gateway = build_server(chosen)
    with listen(chosen) as listener:
        thread = threading.Thread(target=gateway.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline_s = time.monotonic() + _START_S
            while not gateway.started:
                assert thread.is_alive(), "the gateway did not start"
                assert time.monotonic() < deadline_s, "the gateway does not get ready"
                time.sleep(0.01)
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            gateway.should_exit = True
            thread.join()
