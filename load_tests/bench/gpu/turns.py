"""The turn protocol in the engine: so many sessions at once, 16 tokens in and 8 out, one turn after the other.

A turn's time is from posting it for all sessions until the last one has its last token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm import tqdm

from load_tests.bench.gpu.answers import Answer
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.steps import grown
from load_tests.bench.gpu.subject import Subject
from load_tests.bench.results import percentile
from microturn.bench.grown_sessions import GrownSessions

NUM_INPUT, NUM_OUTPUT = 16, 8
_PER_TURN = NUM_INPUT + NUM_OUTPUT
_NUM_AVERAGED = 10


def measure_turns(subject: Subject, extent: Extent) -> dict[str, object]:
    """A long run from nothing, then some turns at every number of sessions and every context."""
    run = _long_run(subject, extent)
    kinds = [(rows, length) for length in sorted(extent.context_lens) for rows in extent.rows]
    turns = [_turns_at(subject, extent, *kind) for kind in tqdm(kinds, desc="turns at", unit="kind", leave=False)]
    subject.sessions.end_all()
    return {"run": run, "turns": turns}


def _long_run(subject: Subject, extent: Extent) -> dict[str, object]:
    sessions, num_rows = subject.sessions, extent.turn_rows
    ids = grown(sessions, num_rows, 1)
    take_turn(sessions, ids)  # nobody's first turn is counted
    turns_ms: list[float] = []
    ended_s = time.perf_counter() + extent.most_s
    for _ in tqdm(range(1, extent.num_turns), desc=f"turns of {num_rows}", unit="turn", leave=False):
        turns_ms.append(take_turn(sessions, ids))
        if time.perf_counter() > ended_s:
            break
    sessions.end_all()
    floors_ms = [
        subject.roofline.turn_ms(num_rows, 1 + _PER_TURN * number, NUM_INPUT, NUM_OUTPUT)
        for number in range(1, len(turns_ms) + 1)
    ]
    first, last = slice(0, _NUM_AVERAGED), slice(-_NUM_AVERAGED, None)
    first_ms, last_ms, first_floor_ms, last_floor_ms = (
        _mean(of[part]) for of in (turns_ms, floors_ms) for part in (first, last)
    )
    return {
        "num_rows": num_rows,
        "num_turns": len(turns_ms) + 1,
        "first_ms": first_ms,
        "last_ms": last_ms,
        "first_floor_ms": first_floor_ms,
        "last_floor_ms": last_floor_ms,
        "first_of_roofline": first_floor_ms / first_ms,
        "last_of_roofline": last_floor_ms / last_ms,
        "growth_over_that_of_floors": (last_ms / first_ms) / (last_floor_ms / first_floor_ms),
        "ms": [round(ms, 3) for ms in turns_ms],
        "floor_ms": [round(ms, 3) for ms in floors_ms],
    }


def _turns_at(subject: Subject, extent: Extent, num_rows: int, context_len: int) -> dict[str, object]:
    kind: dict[str, object] = {"num_rows": num_rows, "context_len": context_len}
    if not subject.has_room(num_rows, context_len + _PER_TURN * (extent.num_turns_at + 1)):
        return {**kind, "skipped": "the pool is too small"}
    ids = grown(subject.sessions, num_rows, context_len)
    take_turn(subject.sessions, ids)
    turn_ms = percentile([take_turn(subject.sessions, ids) for _ in range(extent.num_turns_at)], 50)
    halfway = context_len + _PER_TURN * (extent.num_turns_at + 1) // 2
    floor_ms = subject.roofline.turn_ms(num_rows, halfway, NUM_INPUT, NUM_OUTPUT)
    return {**kind, "p50_ms": turn_ms, "floor_ms": floor_ms, "of_roofline": floor_ms / turn_ms}


def take_turn(sessions: GrownSessions, ids: Sequence[int]) -> float:
    """Milliseconds of one turn of all sessions."""
    answers = [Answer() for _ in ids]
    started_s = time.perf_counter()
    for session_id, answer in zip(ids, answers, strict=True):
        sessions.submit(session_id, answer, NUM_INPUT, {"max_tokens": NUM_OUTPUT, "ignore_eos": True})
    sessions.run_out()
    for answer in answers:
        answer.result()
    return (max(answer.tokens_s[-1] for answer in answers) - started_s) * 1e3


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
