"""Sessions whose KV has left the device for pinned memory of the host: how long their next turns wait for it.

A pool for a few sessions, and more of them than it holds. `restore` is the engine's own `timing_ms.restore`: from when
a turn is taken up until its KV is back. First they come in random order, those in host memory alone, each when nothing
else moves any more. Then they come in turn by a slow clock, so that the engine brings each back ahead of its turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from tqdm import tqdm

from load_tests.bench.gpu.answers import Answer
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.steps import grown
from load_tests.bench.gpu.subject import Subject, on_own_thread
from load_tests.bench.results import percentile
from microturn.bench.grown_sessions import GrownSessions
from microturn.engine.maintenance import Maintenance
from microturn.sessions.turn import Status

# A beat is known after so many turns.
_NUM_LEARNT = 4


def measure_restore(subject: Subject, extent: Extent) -> dict[str, object]:
    """Both orders; the subject's pool has room for `extent.num_in_pool` sessions of the longest context."""
    sessions, context_len = subject.sessions, max(extent.context_lens)
    ids = grown(sessions, extent.num_away, context_len)
    kv = subject.loaded.runner.kv
    num_bytes = kv.groups.num_groups * subject.loaded.pool.num_pages_for(context_len) * kv.bytes_per_page
    copy_ms = num_bytes / subject.card.to_device_bytes_per_s * 1e3
    with on_own_thread(sessions.engine):
        from_host = _in_any_order(sessions, extent.num_restored)
        slot_s = max(3e-3 * percentile(_timing(from_host, "total"), 50), 0.02)
        on_beat = _on_beat(sessions, ids, extent.num_rounds, slot_s)
    sessions.end_all()
    restore_ms, hidden_ms = _timing(from_host, "restore"), _timing(on_beat, "restore")
    return {
        "context_len": context_len,
        "num_bytes": num_bytes,
        "copy_ms": copy_ms,
        "restore_p50_ms": percentile(restore_ms, 50),
        "restore_p99_ms": percentile(restore_ms, 99),
        "restore_over_copy": percentile(restore_ms, 50) / copy_ms,
        "restore_ms": restore_ms,
        "beat": {
            "beat_s": len(ids) * slot_s,
            "num_turns": len(on_beat),
            "hidden_share": sum(ms == 0 for ms in hidden_ms) / len(hidden_ms),
            "restore_ms": hidden_ms,
            "total_p50_ms": percentile(_timing(on_beat, "total"), 50),
            "total_p99_ms": percentile(_timing(on_beat, "total"), 99),
        },
    }


def _in_any_order(sessions: GrownSessions, num_turns: int) -> list[Status]:
    choose = random.Random(0)
    statuses = []
    for _ in tqdm(range(num_turns), desc="restored", unit="turn", leave=False):
        away = [session_id for session_id, place in _settled(sessions).items() if place == "host"]
        statuses.append(_turn(sessions, choose.choice(away)))
    return statuses


def _on_beat(sessions: GrownSessions, ids: Sequence[int], num_rounds: int, slot_s: float) -> list[Status]:
    """Turns by the clock, once all beats are known."""
    statuses = []
    began_s = time.monotonic()
    for slot in tqdm(range(num_rounds * len(ids)), desc="on a slow beat", unit="turn", leave=False):
        time.sleep(max(0.0, began_s + slot * slot_s - time.monotonic()))
        statuses.append(_turn(sessions, ids[slot % len(ids)]))
    return statuses[_NUM_LEARNT * len(ids) :]


def _turn(sessions: GrownSessions, session_id: int) -> Status:
    answer = Answer()
    sessions.submit_from(session_id, answer, num_given=1, num_output=1)
    return answer.result()


def _settled(sessions: GrownSessions) -> dict[int, str]:
    """Where the KV of each session is once nothing moves any more."""
    before: dict[int, str] = {}
    while (now := _places(sessions)) != before:
        before = now
        time.sleep(0.1)
    return now


def _places(sessions: GrownSessions) -> dict[int, str]:
    return {session["id"]: session["kv"] for session in sessions.engine.call(Maintenance.describe)}


def _timing(statuses: Sequence[Status], part: str) -> list[float]:
    return [status.timing_ms[part] for status in statuses]
