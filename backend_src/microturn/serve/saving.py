"""Has the engine save its sessions before the server is stopped."""

from __future__ import annotations

from pathlib import Path

from microturn.admin.client import ask
from microturn.errors import MicroturnError
from microturn.serve import console

# For the way there and back, beside what the engine may take.
_MARGIN_S = 0.5


def save_sessions(admin_socket: Path, timeout_s: float) -> bool:
    """Drains the engine: turns that run may end, then every session is saved and no more turns are taken.

    Args:
        admin_socket: the engine's.
        timeout_s: how long all of it may take.

    Returns:
        Whether the engine did it. If not, it goes on, and the terminal was told why.
    """
    try:
        done = ask(admin_socket, "drain", timeout_s + _MARGIN_S, timeout_s=timeout_s)
    except MicroturnError as error:
        console.say(f"the sessions could not be saved: {error.args[0]}")
        return False
    lost = f", {done['failed']} are lost" if done["failed"] else ""
    with_kv = f", {done['with_kv']} of them with their KV" if done["with_kv"] else ""
    console.say(f"saved {done['saved']} sessions{with_kv}{lost}")
    return True
