"""How a session begins: as a new one, as one that was opened before, from the token of one, or as a branch.

A branch has what its parent's client knows, whatever the server has of the parent just then. It may have less, while it
is told again what it had lost, and more, where a turn has ended since: so the branch says where it begins. Where that
is behind the end, or what is there is not the same yet, the branch is opened anew and told all. Knows no stream.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping

from microturn_client._errors import InvalidArgument, NotFound
from microturn_client._inputs import encode_input
from microturn_client._pending_turn import PendingTurn
from microturn_client._requests import Requests
from microturn_client._retry import Recovery
from microturn_client._session_core import SessionCore
from microturn_client._wire import SessionId, new_session_id

_KEY_BYTES = 24


def new_core(
    model: str, session_id: SessionId | None, options: Mapping[str, object], recovery: Recovery | None
) -> SessionCore:
    """A session as its user asks for it.

    An id that nobody chose comes with a key, so that nobody else can use the session. With a recovery the seed is drawn
    here too: then it is known even where START was never answered.

    Args:
        model: name of the model on the server.
        session_id: None draws one.
        options: see ``SessionOptions``.
        recovery: how it survives; None does not.

    Raises:
        InvalidArgument, TypeError: for an id or an option that has no form on the wire.
    """
    options = {name: value for name, value in options.items() if value is not None}
    goes_on = "fork_of" in options or "resume" in options
    if session_id is None:
        session_id = new_session_id()
        if not goes_on:
            options.setdefault("session_key", new_key())
    if recovery is None:
        return SessionCore(Requests(model, session_id, options))
    if not goes_on:
        options.setdefault("seed", secrets.randbits(63))
    is_attached = bool(options.pop("resume", False))
    requests = Requests(model, session_id, options, is_recorded=True)
    return SessionCore(requests, recovery=recovery, is_attached=is_attached)


def new_key() -> str:
    """A random key."""
    return secrets.token_urlsafe(_KEY_BYTES)


def token_of(requests: Requests) -> str:
    """A session as one text, by which another process can go on with it: model, id, key, where it is, tools' names."""
    said: dict[str, object] = {"model": requests.model, "id": requests.session_id, "key": requests.key}
    said |= {"route": requests.route, "tools": requests.tool_names}
    return base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")


def attached_core(token: str, options: Mapping[str, object], recovery: Recovery | None) -> SessionCore:
    """The session that a token names.

    Raises:
        InvalidArgument: it is no token.
    """
    try:
        said = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        model, session_id, key, route = said["model"], said["id"], said["key"], said.get("route")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("this is no token of a session") from error
    core = new_core(str(model), session_id, {**options, "session_key": key, "resume": True}, recovery)
    core.requests.route = route if isinstance(route, str) and route.isascii() else None
    core.requests.tool_names = tuple(name for name in said.get("tools", ()) if isinstance(name, str))
    return core


def begin_branch(parent: SessionCore, session_id: SessionId, timeout_s: float) -> tuple[SessionCore, PendingTurn]:
    """A session that goes on from what another one knows, and its first turn, which appends nothing.

    Raises:
        MicroturnError: as ``SessionCore.begin_turn``.
    """
    parent.check_usable()
    requests = parent.requests.branch(session_id, parent.lifecycle.seed)
    core = SessionCore(requests, parent.clock, recovery=parent.recovery, transcript=parent.transcript.copy())
    options: dict[str, object] = {}
    if core.survival is not None and parent.survival is not None:
        if parent.survival.is_telling:
            core.survival.reopen(core, NotFound(f"session '{parent.id}' is being told what it was: none can be forked"))
        elif len(core.transcript) and not _is_cut_before(parent, len(core.transcript)):
            options["rewind_to"] = len(core.transcript)
    return core, core.begin_turn(encode_input(None), options, timeout_s)


def _is_cut_before(core: SessionCore, position: int) -> bool:
    """Whether a turn without an answer cuts before a position: what is there then may be another text."""
    cuts = [turn.options.get("rewind_to") for turn in core.outbox]
    return any(isinstance(cut, int) and cut < position for cut in cuts)
