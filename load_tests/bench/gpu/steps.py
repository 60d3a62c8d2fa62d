"""Decode steps: the time between two tokens of a session, while so many sessions each get one in every step.

Seen from outside, over a turn of many tokens: an engine that runs ahead of the model has no step that could be timed
by itself. The steps around an append are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from tqdm import tqdm

from load_tests.bench.gpu.answers import Answer
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.subject import Subject
from load_tests.bench.results import percentile
from microturn.bench.grown_sessions import GrownSessions

# Tokens of a turn before steps are counted.
_NUM_WARM_UP = 8
# Steps between two rewinds while steps are watched for long.
_NUM_WATCHED = 256


def measure_decode(subject: Subject, extent: Extent) -> dict[str, object]:
    """All numbers of sessions at all contexts."""
    sessions, steps = subject.sessions, []
    kinds = [(rows, length) for length in sorted(extent.context_lens) for rows in extent.rows]
    for num_rows, context_len in tqdm(kinds, desc="decode", unit="kind", leave=False):
        length = length_after(context_len, extent.num_steps)
        if not subject.has_room(num_rows, length + 1):
            steps.append({"num_rows": num_rows, "context_len": context_len, "skipped": "the pool is too small"})
            continue
        ids = grown(sessions, num_rows, context_len)
        steps_ms = decode_steps_ms(sessions, ids, extent.num_steps)
        floor_ms = subject.roofline.pass_ms(num_rows, length - extent.num_steps / 2)
        steps.append({"num_rows": num_rows, "context_len": context_len, **_told(steps_ms, floor_ms)})
    sessions.end_all()
    return {"steps": steps}


def watch_steps(subject: Subject, extent: Extent) -> dict[str, object]:
    """Steps of one kind for a long time: how much later than usual the latest ones come."""
    sessions, context_len = subject.sessions, max(extent.context_lens)
    ids = grown(sessions, extent.steady_rows, context_len)
    steps_ms: list[float] = []
    end_s = time.perf_counter() + extent.steady_s
    with tqdm(total=round(extent.steady_s), desc="steady", unit="s", leave=False) as progress:
        while (left_s := end_s - time.perf_counter()) > 0:
            steps_ms += decode_steps_ms(sessions, ids, _NUM_WATCHED)
            progress.update(round(extent.steady_s - left_s) - progress.n)
    sessions.end_all()
    floor_ms = subject.roofline.pass_ms(len(ids), context_len + _NUM_WARM_UP + _NUM_WATCHED / 2)
    told = _told(steps_ms, floor_ms)
    return {"num_rows": len(ids), "context_len": context_len, "num_steps": len(steps_ms), **told}


def grown(sessions: GrownSessions, num_rows: int, context_len: int) -> Sequence[int]:
    """So many sessions of just so many tokens."""
    ids = range(1, num_rows + 1)
    sessions.grow(ids, context_len)
    return ids


def length_after(context_len: int, num_steps: int) -> int:
    """Tokens that a session holds after steps that were timed."""
    return context_len + _NUM_WARM_UP + num_steps


def decode_steps_ms(sessions: GrownSessions, ids: Sequence[int], num_steps: int, **sampling: float) -> list[float]:
    """Milliseconds of so many steps; what the sessions appended meanwhile is cut off when they take their next turn.

    Args:
        sessions: all.
        ids: of those that take a turn.
        num_steps: that are timed.
        sampling: options of their turns; greedy without.
    """
    answers = [Answer() for _ in ids]
    for session_id, answer in zip(ids, answers, strict=True):
        sessions.submit_from(session_id, answer, num_given=1, num_output=_NUM_WARM_UP + num_steps, **sampling)
    sessions.run_out()
    for answer in answers:
        answer.result()
    steps_s = [later - sooner for sooner, later in pairwise(answers[0].tokens_s)]
    return [step_s * 1e3 for step_s in steps_s[-num_steps:]]


def _told(steps_ms: Sequence[float], floor_ms: float) -> dict[str, float]:
    p50_ms, p99_ms = percentile(steps_ms, 50), percentile(steps_ms, 99)
    return {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "max_ms": max(steps_ms),
        "mean_ms": sum(steps_ms) / len(steps_ms),
        "p99_over_p50": p99_ms / p50_ms,
        "floor_ms": floor_ms,
        "of_roofline": floor_ms / p50_ms,
    }
