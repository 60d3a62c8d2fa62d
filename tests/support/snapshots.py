"""Sessions with something to lose, and what they are saved with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from microturn.offload.copies import KVCopy
from microturn.sessions.inputs import EmbedInput
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.session_state import snapshot_of
from microturn.snapshots.snapshot import Snapshot
from support.driver import Driver, Recorder
from support.fake_runner import HIDDEN_SIZE, FakeDriver

Restart = Callable[..., FakeDriver]

RESUME = {"start": True, "resume": True}
KEY = {"session_key": "ours"}
FAR_S = 4e9  # seconds since 1970: after this test
SETTINGS = {
    "session_priority": 2,
    "idle_timeout_s": 30,
    "max_context": 200,
    "cache_salt": "salt",
    "temperature": 0.7,
    "top_k": 40,
    "stop_token_ids": "[96]",
    "seed": 11,
}


def live(driver: FakeDriver, session_id: SessionId = 1, **values: Any) -> list[Recorder]:
    """A session with ids, embeddings, numbered turns and settings of its own; what its turns answered."""
    embeds = EmbedInput(torch.linspace(-1, 1, 3 * HIDDEN_SIZE).reshape(3, HIDDEN_SIZE))
    return [
        driver.turn(session_id, [5, 6, 7], start=True, turn=0, max_tokens=3, logprobs=3, **SETTINGS, **values),
        driver.turn(session_id, embeds, turn=1, max_tokens=2, **values),
        driver.turn(session_id, [8], turn=2, max_tokens=2, return_appended_ids=True, **values),
    ]


def find(driver: Driver, session_id: SessionId = 1) -> Session:
    """A living session."""
    session = driver.engine._sessions.find(session_id)
    assert session is not None
    return session


def saved(driver: Driver, session_id: SessionId = 1, *, epoch: int = 1, expires_s: float = FAR_S) -> Snapshot:
    """What is saved of a living session."""
    session = find(driver, session_id)
    resting = session.at_rest(driver.engine.environment.new_table(session.window))
    return snapshot_of(resting, driver.engine.environment, epoch=epoch, expires_s=expires_s)


def files(directory: Path, suffix: str) -> list[Path]:
    """What is saved, by the kind of file."""
    return list(directory.glob(f"*{suffix}"))


def copied_kv(driver: Driver, session_id: SessionId = 1) -> KVCopy:
    """The KV of a living session."""
    copies = driver.engine.copies
    copying = copies.begin(find(driver, session_id))
    assert copying is not None, "there is no KV"
    while not copies.advance(copying):
        copying.settle()
        driver.engine.check_integrity()
    copies.end(copying)
    driver.engine.check_integrity()
    return copies.finish(copying)
