"""Dynamo's runtime with our defaults. Its own environment variables (``DYN_…``) say otherwise where they are set."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from microturn.errors import InvalidArgument

T = TypeVar("T")

# An endpoint's path is namespace.component.endpoint.
COMPONENT = "worker"
TURN, CONTROL = "turn", "control"
# Nobody serves it.
NOBODY = "nobody"

_DEFAULTS = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    # Embeddings of a long prompt are larger than the 32 MiB that it allows by itself.
    "DYN_TCP_MAX_MESSAGE_SIZE": str((1 << 31) - 1),
    # Dynamo ends the runtime of a process, with its sessions, when etcd is away for longer than that; its own 10 s are
    # shorter than many a restart of etcd. No lease is needed to notice that a worker has died: see `Workers`.
    "ETCD_LEASE_TTL": "300",
    # Its own two minutes pass in silence, and an orchestrator starts again what has ended.
    "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "5",
}
_DEFAULT_ETCD = "http://localhost:2379"  # Dynamo's own
# Without the second part the caller's side logs a line for every turn, whatever the level. The third says for each
# question to a worker that has died what `Workers` says once.
_QUIET = "warn,request_span[{request.outcome}]=off,dynamo_runtime::pipeline::network::egress::tcp_client=error"


def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs a process's work on an event loop: uvloop's, which Dynamo brings, and which is a third faster."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:  # `start_runtime` says what is missing
        return None
    return new_event_loop


def start_runtime(host: str, etcd: str | None = None, system_port: int | None = None) -> Any:
    """Dynamo's `DistributedRuntime`, on the running event loop.

    Args:
        host: the address to listen on.
        etcd: its URLs, with commas; None leaves discovery to Dynamo's variables, and to files without them.
        system_port: of its HTTP server with ``/health`` and ``/metrics``; None is no such server.

    Raises:
        InvalidArgument: it is not installed, or cannot start.
    """
    defaults = _DEFAULTS | {"DYN_TCP_RPC_HOST": host, "DYN_TCP_RESPONSE_STREAM_HOST": host, "DYN_SYSTEM_HOST": host}
    if system_port is not None:
        defaults["DYN_SYSTEM_PORT"] = str(system_port)
    if etcd is not None:
        os.environ.update(DYN_DISCOVERY_BACKEND="etcd", ETCD_ENDPOINTS=etcd)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    backend = os.environ["DYN_DISCOVERY_BACKEND"]
    try:
        with _quiet():
            from dynamo.runtime import DistributedRuntime

            return DistributedRuntime(
                asyncio.get_running_loop(),
                backend,
                os.environ["DYN_REQUEST_PLANE"],
                event_plane=os.environ["DYN_EVENT_PLANE"],
            )
    except ImportError as error:
        raise InvalidArgument(
            f"NVIDIA Dynamo's runtime is not installed: pip install 'microturn[dynamo]' ({error})"
        ) from error
    except Exception as error:  # of no particular type
        where = f" with etcd at {os.environ.get('ETCD_ENDPOINTS', _DEFAULT_ETCD)}" if backend == "etcd" else ""
        raise InvalidArgument(f"Dynamo's runtime does not start{where}: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Sets what the runtime logs, and keeps back its warning, of several lines, that such a filter takes time."""
    if "DYN_LOG" in os.environ:
        yield
        return
    os.environ["DYN_LOG"] = _QUIET
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
