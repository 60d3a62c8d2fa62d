"""Asks the engine through the admin socket, before the server is stopped: for turns, and to save its sessions."""

from __future__ import annotations

from pathlib import Path

from microturn.admin.client import ask
from microturn.errors import MicroturnError
from microturn.serve import console

# For the round trip, added to the engine's time.
_MARGIN_S = 0.5


def is_busy(admin_socket: Path) -> bool:
    """Whether an engine has turns; True where it does not say.

    Args:
        admin_socket: the engine's.
    """
    try:
        return bool(ask(admin_socket, "is_busy", _MARGIN_S))
    except MicroturnError:
        return True


def save_sessions(admin_socket: Path, timeout_s: float) -> bool:
    """Drains the engine: sessions are saved one by one while the others go on, then what is left.

    Args:
        admin_socket: the engine's.
        timeout_s: how long all of it may take.

    Returns:
        Whether the sessions are saved. If not, the engine goes on, and the reason is on stderr.
    """
    try:
        done = ask(admin_socket, "drain", timeout_s + _MARGIN_S, timeout_s=timeout_s)
    except MicroturnError as error:
        console.say(f"the sessions could not be saved: {error.args[0]}")
        return False
    lost = f", {done['failed']} are lost" if done["failed"] else ""
    with_kv = f", {done['with_kv']} of them with their KV" if done["with_kv"] else ""
    moved = f", {done['moved']} of them on other servers" if done["moved"] else ""
    console.say(f"saved {done['saved']} sessions{with_kv}{moved}{lost}")
    return True
