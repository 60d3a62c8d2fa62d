"""The command lines of ``microturn worker`` and ``microturn edge``."""

from __future__ import annotations

import argparse
import os
import re
import socket
from pathlib import Path

from microturn.serve.options import DEFAULT_MODEL, port, seconds
from microturn.settings import absolute_place

# How long a question may be unanswered. Workers lose one first: the clients that an edge then sends to another worker
# have it ask for their sessions, and it should not wait for the one that is lost.
_LOST_TO_WORKERS_S, _LOST_TO_EDGES_S = 1.0, 1.5

# Dynamo 1.6 reads this port as a signed number of 16 bits.
_MAX_SYSTEM_PORT = 32767


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``microturn worker``."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="DIR|FILE|NAME", help="as 'microturn serve' has it (%(default)s)")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="override a setting of the engine; repeatable")
    add(
        "--name",
        type=_name,
        default=f"{socket.gethostname()}-{os.getpid()}",
        help="by which clients come back (%(default)s)",
    )
    _add_namespace_arguments(parser, _LOST_TO_WORKERS_S)
    add("--host", type=_reachable, default="127.0.0.1", help="address to listen on, and to be found by (%(default)s)")
    add("--peer-port", type=port, default=8004, help="take sessions from other workers (%(default)s)")
    add("--metrics-port", type=_low_port, default=8002, help="Dynamo's HTTP with /metrics and /health (%(default)s)")
    add("--grpc-port", type=port, help="take clients without an edge as well (default: closed)")
    add("--admin-socket", metavar="PATH", type=Path, help="socket for 'microturn sessions' (default: none)")
    add(
        "--snapshot-dir",
        metavar="DIR|s3://BUCKET/PREFIX",
        type=absolute_place,
        help="save live sessions there, and find saved ones",
    )
    add("--log-format", choices=("auto", "text", "json"), default="auto", help="as 'microturn serve' has it")
    add("--grace-s", type=seconds, default=10.0, help="on SIGTERM, stop within so long (%(default)g)")
    add("--drain-notice-s", type=seconds, default=1.0, help="part of it in which edges notice (%(default)g)")
    add("--engine-timeout-s", type=seconds, default=10.0, help="end when the engine is silent so long (%(default)g)")


def add_edge_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``microturn edge``."""
    _add_namespace_arguments(parser, _LOST_TO_EDGES_S)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--grpc-port", type=port, default=8001, help="sessions, and gRPC health (%(default)s)")
    parser.add_argument("--grace-s", type=seconds, default=1.0, help="on SIGTERM, end streams then (%(default)g)")


def _name(text: str) -> str:
    """It travels as `route=…` in errors and as gRPC's metadata, which a letter beyond ASCII breaks."""
    if not re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", text):
        raise argparse.ArgumentTypeError(f"a name is 1 to 128 of A-Z a-z 0-9 . _ : / -, not '{text}'")
    return text


def _reachable(text: str) -> str:
    """Others hand sessions over to the address that is named here."""
    if text in ("0.0.0.0", "::", "[::]", ""):
        raise argparse.ArgumentTypeError(f"name the address by which other machines reach this worker, not '{text}'")
    return text


def _urls(text: str) -> str:
    """Dynamo takes anything, and says after a while that nobody answers there."""
    for url in text.split(","):
        if not re.fullmatch(r"https?://[^/\s,]+:\d+", url):
            raise argparse.ArgumentTypeError(f"name etcd as http://HOST:PORT, several with commas, not '{text}'")
    return text


def _low_port(text: str) -> int:
    number = port(text)
    if number > _MAX_SYSTEM_PORT:
        raise argparse.ArgumentTypeError(f"Dynamo takes a port up to {_MAX_SYSTEM_PORT} for its HTTP, not {text}")
    return number


def _add_namespace_arguments(parser: argparse.ArgumentParser, lost_after_s: float) -> None:
    """Declares what a worker and an edge on Dynamo's runtime have in common."""
    parser.add_argument("--namespace", default="microturn", help="Dynamo's, of workers and edges (%(default)s)")
    parser.add_argument(
        "--etcd",
        type=_urls,
        metavar="URL[,URL…]",
        help="find each other by etcd, http://HOST:2379 (default: by files, or as Dynamo's variables say)",
    )
    parser.add_argument(
        "--lost-after-s",
        type=seconds,
        default=lost_after_s,
        help="a worker that gives no answer for so long is lost (default: %(default)g)",
    )
