"""What can be asked through the admin socket.

| op | arguments | result |
| --- | --- | --- |
| `list` | | the living sessions |
| `export` | `id`, `path`, `move`, `ttl_s` | the file's session: `id`, `context_len`, `epoch` |
| `import` | `path` | the same |
| `drain` | `timeout_s` | how many sessions were `saved`, and how many `failed` |

Files are written and read in the thread of who asks; the engine's thread only copies a session, or adds one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from microturn.engine import Engine
from microturn.errors import FailedPrecondition, InvalidArgument, MicroturnError, NotFound
from microturn.housekeeping import Housekeeping
from microturn.nearest import did_you_mean
from microturn.session import Session
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file import UnreadableSnapshot, claim, read_snapshot, write_snapshot
from microturn.snapshots.session_state import snapshot_of

log = logging.getLogger(__name__)

_POLL_S = 0.02
# Of the time for a drain, what turns may take that still run; the rest is for writing.
_SHARE_OF_TURNS = 0.6


class Operations:
    """Does what is asked of one engine.

    Args:
        engine: runs in a thread of its own. A drain saves its sessions where it finds them again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._operations = {
            "list": self._list,
            "export": self._export,
            "import": self._import,
            "drain": self._drain,
        }

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Does one operation.

        Raises:
            MicroturnError: why it was not done.
        """
        op = request.get("op")
        if op not in self._operations:
            raise InvalidArgument(f"unknown operation '{op}': {did_you_mean(str(op), self._operations)}")
        return self._operations[op](request)

    def _list(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._engine.call(Housekeeping.describe)

    def _export(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path = _path(request)
        name, move = _text(request, "id"), bool(request.get("move"))
        ttl_s = _seconds(request, "ttl_s")
        if path.exists():
            raise FailedPrecondition(f"{path} is there already: export to another file")
        copy = self._engine.call(lambda sessions: sessions.copy(name))
        write_snapshot(path, snapshot_of(copy, self._engine.host, epoch=copy.epoch, expires_s=time.time() + ttl_s))
        try:
            self._engine.call(lambda sessions: sessions.give_away(copy) if move else sessions.outdate(copy))
        except MicroturnError:
            path.unlink(missing_ok=True)
            raise
        return _told(copy)

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
        return _told(self._engine.call(lambda sessions: sessions.admit(snapshot, partial(_claim, path))))

    def _drain(self, request: Mapping[str, Any]) -> dict[str, int]:
        deadline_s = time.monotonic() + _seconds(request, "timeout_s")
        turns_until_s = time.monotonic() + _SHARE_OF_TURNS * _seconds(request, "timeout_s")
        self._engine.call(Housekeeping.drain)
        while time.monotonic() < turns_until_s and self._engine.call(lambda sessions: sessions.is_busy):
            time.sleep(_POLL_S)
        resting = self._engine.call(Housekeeping.put_to_rest)
        if self._engine.snapshots is None:
            return {"saved": 0, "failed": len(resting)}
        num_saved = 0
        for session in resting:
            if time.monotonic() > deadline_s:
                log.error("no time is left to save %d sessions", len(resting) - num_saved)
                break
            num_saved += self._save(self._engine.snapshots, session)
        return {"saved": num_saved, "failed": len(resting) - num_saved}

    def _save(self, snapshots: SnapshotDirectory, session: Session) -> bool:
        try:
            snapshots.save(snapshot_of(session, self._engine.host, epoch=session.epoch, expires_s=snapshots.expires_s))
        except MicroturnError as error:
            log.error("session %s is lost: %s", session.id, error)
            return False
        return True


def _claim(path: Path) -> None:
    try:
        if claim(path, path.with_name(f"{path.name}.claimed")):
            return
    except OSError as error:
        raise FailedPrecondition(f"cannot claim {path}: {error.strerror}") from error
    raise NotFound(f"{path} was claimed by somebody else")


def _told(session: Session) -> dict[str, Any]:
    return {"id": session.id, "context_len": len(session.context), "epoch": session.epoch}


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
