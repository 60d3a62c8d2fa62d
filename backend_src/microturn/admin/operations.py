"""The operations of the admin socket.

| op | arguments | result |
| --- | --- | --- |
| `list` | | the live sessions |
| `export` | `id`, `path`, `move`, `kv`, `ttl_s` | the file's session: `id`, `context_len`, `kv_len`, `epoch` |
| `import` | `path` | the same |
| `move` | `id`, `to` | the same, and `to`; without `to` the emptiest server is found |
| `drain` | `timeout_s` | numbers of sessions `saved`, `failed`, saved `with_kv`, and `moved` |

Files are written and read in the caller's thread; the engine thread only copies or adds a session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from microturn.admin.drain import drain
from microturn.admin.hand_over import send_to_peer
from microturn.admin.kv import collect_kv
from microturn.admin.peer_address import read_address
from microturn.admin.peers import Peers
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import (
    FailedPrecondition,
    InvalidArgument,
    MicroturnError,
    NotFound,
    Unavailable,
    did_you_mean,
)
from microturn.offload.copies import Copying
from microturn.sessions.session import Session
from microturn.snapshots.claimed_kv import ClaimedFile
from microturn.snapshots.file import UnreadableSnapshot, read_snapshot, write_snapshot
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.restoring import restored_session
from microturn.snapshots.session_state import restore_session, snapshot_of

log = logging.getLogger(__name__)

# Of the time of a drain: how long what is being saved just now may take.
_SHARE_OF_STOP = 0.1


class Operations:
    """The operations on one engine.

    Args:
        engine: runs in its own thread. A drain saves its sessions to its snapshot directory.
        peers: the other servers, which sessions are moved to; None if there are none.
        stop_moving: is called before a drain, with the seconds that it may take: nothing else should save or move
            sessions then.
    """

    def __init__(
        self, engine: Engine, peers: Peers | None = None, stop_moving: Callable[[float], None] | None = None
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._stop_moving = stop_moving
        self._draining = threading.Lock()
        self._operations = {
            "list": self._list,
            "is_busy": self._is_busy,
            "export": self._export,
            "import": self._import,
            "move": self._move,
            "drain": self._drain,
        }

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Runs one operation.

        Raises:
            MicroturnError: the operation failed.
        """
        op = request.get("op")
        if op not in self._operations:
            raise InvalidArgument(f"unknown operation '{op}': {did_you_mean(str(op), self._operations)}")
        return self._operations[op](request)

    def _list(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._engine.call(Maintenance.describe)

    def _is_busy(self, request: Mapping[str, Any]) -> bool:
        return self._engine.call(lambda sessions: sessions.is_busy)

    def _export(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path = _path(request)
        name, move, with_kv = _text(request, "id"), bool(request.get("move")), bool(request.get("kv"))
        ttl_s = _seconds(request, "ttl_s")
        if path.exists():
            raise FailedPrecondition(f"{path} is there already: export to another file")

        def begin(sessions: Maintenance) -> tuple[Session, Copying | None]:
            copy = sessions.copy(name)
            return copy, sessions.begin_copying(copy.id) if with_kv else None

        copy, copying = self._engine.call(begin)
        kv = collect_kv(self._engine, copy.id, copying)
        write_snapshot(
            path, snapshot_of(copy, self._engine.environment, epoch=copy.epoch, expires_s=time.time() + ttl_s), kv
        )
        try:
            self._engine.call(lambda sessions: sessions.release_moved(copy) if move else sessions.bump_epoch(copy))
        except MicroturnError:
            path.unlink(missing_ok=True)
            raise
        return _told(copy, 0 if kv is None else kv.state.kv_len)

    def _import(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path = _path(request)
        try:
            snapshot = read_snapshot(path)
        except UnreadableSnapshot as error:
            log.error("%s cannot be imported: %s", path, error)
            raise InvalidArgument(f"{path} cannot be imported: {error}") from error
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
        except OSError as error:
            raise FailedPrecondition(f"cannot read {path}: {error.strerror}") from error
        if snapshot.header.expires_s <= time.time():
            raise FailedPrecondition(f"{path} has expired: export the session again")

        session = restore_session(snapshot, self._engine.environment)
        self._engine.call(lambda sessions: sessions.arrivals.expect(session, snapshot.header))
        try:
            taken = restored_session(session, snapshot, _claim(path), self._engine.runner.kv.page_parts)
        except MicroturnError:
            self._engine.call(lambda sessions: sessions.arrivals.withdraw(session.id))
            raise

        def admit(sessions: Maintenance) -> dict[str, Any]:
            sessions.arrivals.admit(taken)
            return _told(session, session.kv_len)

        return self._engine.call(admit)

    def _move(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._peers is None:
            raise FailedPrecondition("this server knows no other: start it with --peer-port and the setting 'peers'")
        copy = self._engine.call(partial(Maintenance.copy, name=_text(request, "id")))
        to = request.get("to")
        if to is None:
            others = self._peers.others(self._engine.environment.model_fingerprint)
            if not others:
                raise Unavailable("no other server of this model takes sessions now")
            address = others[0].address
        else:
            try:
                address = read_address(_text(request, "to"))
            except ValueError as error:
                raise InvalidArgument(
                    f"'to' is where another server takes sessions, its --peer-port: {error}"
                ) from error
        with self._peers.connect(address) as connection:
            sent = send_to_peer(self._engine, copy.id, connection)
        if sent is None:
            raise NotFound(f"session '{copy.id}' has ended")
        return {**_told(sent.session, sent.kv_len), "to": f"{address[0]}:{address[1]}"}

    def _drain(self, request: Mapping[str, Any]) -> dict[str, int]:
        if not self._draining.acquire(blocking=False):
            raise FailedPrecondition("a drain is under way")
        try:
            until_s = time.monotonic() + _seconds(request, "timeout_s")
            if self._stop_moving is not None:
                self._stop_moving(_SHARE_OF_STOP * (until_s - time.monotonic()))
            return asdict(drain(self._engine, until_s - time.monotonic(), self._peers))
        finally:
            self._draining.release()


def _claim(path: Path) -> ClaimedFile:
    storage, claimed = FileStorage(path.parent), f"{path.name}.claimed"
    try:
        if storage.move(path.name, claimed):
            return ClaimedFile(storage, claimed)
    except OSError as error:
        raise FailedPrecondition(f"cannot claim {path}: {error.strerror}") from error
    raise NotFound(f"{path} was claimed by another process")


def _told(session: Session, kv_len: int) -> dict[str, Any]:
    return {"id": session.id, "context_len": len(session.context), "kv_len": kv_len, "epoch": session.epoch}


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"'{name}' is missing: it is a string")
    return value


def _path(request: Mapping[str, Any]) -> Path:
    path = Path(_text(request, "path"))
    if not path.is_absolute():
        raise InvalidArgument(f"'path' is absolute, not '{path}'")
    return path


def _seconds(request: Mapping[str, Any], name: str) -> float:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidArgument(f"'{name}' is missing: it is a number of seconds above 0")
    return float(value)
