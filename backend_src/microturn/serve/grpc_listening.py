"""The gRPC port of a worker or an edge."""

from __future__ import annotations

import grpc

from microturn.hosts.kserve.service import Front, grpc_server
from microturn.serve.errors import ServeError


def listen(front: Front, host: str, grpc_port: int) -> grpc.aio.Server:
    """A gRPC server before a front, not yet started.

    Raises:
        ServeError: the port is in use.
    """
    try:
        return grpc_server(front, f"{host}:{grpc_port}")
    except RuntimeError as error:
        raise ServeError(f"cannot listen on {host}:{grpc_port} (--grpc-port)") from error
