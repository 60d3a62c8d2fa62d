"""``microturn sessions``: the operations of the admin socket on the command line. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from microturn.admin.client import ask
from microturn.errors import InvalidArgument, MicroturnError, NotFound

SOCKET_NAME = "admin.sock"
_DAY_S = 86400.0
# Timeout of an export: gigabytes on a slow disk.
_PATIENCE_S = 300.0


def add_sessions_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommands of ``microturn sessions``."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show the living sessions", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    listing.set_defaults(act=_list)
    export = actions.add_parser(
        "export", help="write a session to a file, for another server of the same model", allow_abbrev=False
    )
    export.add_argument("id", metavar="ID", help="the session")
    export.add_argument("file", metavar="FILE", type=Path, help="a new file; only you can read it")
    export.add_argument(
        "--move", action="store_true", help="end the session here; otherwise it goes on, and the file is a copy"
    )
    export.add_argument(
        "--kv",
        action="store_true",
        help="with its KV, which is large: a server with the same kv_dtype and page_size need not compute it again",
    )
    export.add_argument(
        "--ttl-s", type=float, default=_DAY_S, help="how long the file may be imported (default: %(default)g)"
    )
    export.set_defaults(act=_export)
    importing = actions.add_parser(
        "import", help="go on with a session from a file, which becomes FILE.claimed", allow_abbrev=False
    )
    importing.add_argument("file", metavar="FILE", type=Path, help="what export wrote")
    importing.set_defaults(act=_import)
    moving = actions.add_parser("move", help="hand a session over to another server, with its KV", allow_abbrev=False)
    moving.add_argument("id", metavar="ID", help="the session")
    moving.add_argument(
        "--to", metavar="HOST:PORT", help="the other server's --peer-port (default: of the emptiest of its peers)"
    )
    moving.set_defaults(act=_move)
    for action in (listing, export, importing, moving):
        action.add_argument(
            "--socket",
            metavar="PATH",
            type=Path,
            help="the server's admin socket (default: that of the one server that you run here)",
        )


def run_sessions(arguments: argparse.Namespace, living_runs: Callable[[], list[Path]]) -> int:
    """Runs a subcommand.

    Args:
        arguments: as parsed.
        living_runs: finds the run directories of this user's running servers.

    Returns:
        The exit code: 1 after one line on stderr.
    """
    try:
        arguments.act(arguments, arguments.socket or _find_socket(living_runs()))
    except MicroturnError as error:
        print(f"microturn: error: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


def _find_socket(runs: Sequence[Path]) -> Path:
    sockets = [path for run in runs if (path := run / SOCKET_NAME).is_socket()]
    if not sockets:
        raise NotFound("no server of yours has an admin socket here: name it with --socket")
    if len(sockets) > 1:
        raise InvalidArgument(
            "several servers run here: choose one with --socket: " + ", ".join(str(path) for path in sorted(sockets))
        )
    return sockets[0]


def _list(arguments: argparse.Namespace, socket: Path) -> None:
    sessions = ask(socket, "list", _PATIENCE_S)
    print(json.dumps(sessions, indent=2) if arguments.json else _table(sessions))


def _export(arguments: argparse.Namespace, socket: Path) -> None:
    path = arguments.file.absolute()
    done = ask(
        socket,
        "export",
        _PATIENCE_S,
        id=arguments.id,
        path=str(path),
        move=arguments.move,
        kv=arguments.kv,
        ttl_s=arguments.ttl_s,
    )
    print(f"{done['id']}: {_tokens(done)} in {path}")


def _import(arguments: argparse.Namespace, socket: Path) -> None:
    done = ask(socket, "import", _PATIENCE_S, path=str(arguments.file.absolute()))
    print(f"{done['id']}: {_tokens(done)}; clients go on with START and resume")


def _move(arguments: argparse.Namespace, socket: Path) -> None:
    done = ask(socket, "move", _PATIENCE_S, id=arguments.id, **({"to": arguments.to} if arguments.to else {}))
    print(f"{done['id']}: {_tokens(done)} to {done['to']}")


def _tokens(done: Mapping[str, Any]) -> str:
    with_kv = f" and the KV of {done['kv_len']}" if done["kv_len"] else ""
    return f"{done['context_len']} tokens{with_kv}"


def _table(sessions: Sequence[Mapping[str, Any]]) -> str:
    tiers = ("device", "host", "disk", "inputs")
    rows = [("ID", "CONTEXT", "KV", *map(str.upper, tiers), "STATE", "AGE", "LAST TURN")]
    for session in sessions:
        last = "now" if session["state"] == "running" else f"{_duration(session['idle_s'])} ago"
        rows.append(
            (
                # Clients choose ids: their control characters must not reach the terminal.
                str(session["id"]).encode("unicode_escape").decode(),
                str(session["context_len"]),
                session["kv"],
                *(_size(session["bytes"][tier]) for tier in tiers),
                session["state"],
                _duration(session["age_s"]),
                last,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "-"
    for unit_bytes, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} B"


def _duration(duration_s: float) -> str:
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if duration_s < limit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{duration_s / _DAY_S:.0f} d"
