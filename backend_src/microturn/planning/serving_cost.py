"""Measures the cost of Triton, adapter and client with a server that it starts and the client library.

Processes that handle turns on the model's cores delay steps. Two figures measure this: the cost of an empty turn while
another session decodes, by which that session's steps become longer; and the cost of a token that is sent at the end of
a step, by which a step of many sessions takes longer than in the engine alone, per session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from microturn.bench.grown_sessions import token_at
from microturn.planning.beat import ServingCost
from microturn.serve.child import running_server
from microturn_client import AsyncClient, AsyncSession

# Sessions whose steps are compared; few enough to append their contexts in seconds.
MOST_ROWS = 8
_NUM_ROUNDS = 9
_NUM_EMPTY = 40
# Tokens of the decoding session, and empty turns per second beside it; more would wait for each other.
_NUM_DECODED, _EMPTY_PER_S = 100, 50.0
_NUM_LONGER = 16


def measure_serving(
    model_dir: Path, weights: str, kv_dtype: str, context_len: int, num_rows: int, decode_s: float
) -> ServingCost:
    """Starts a server and measures; half a minute, and the time to compute the contexts.

    Args:
        model_dir: of the model.
        weights: as in the settings; `kv_dtype` likewise.
        context_len: tokens of each session.
        num_rows: sessions of a decode step that is compared, at most `MOST_ROWS`.
        decode_s: minimum time of this step in the engine alone: disturbances only add to it.

    Raises:
        RuntimeError: the server does not start; the reason is on stderr.
        MicroturnError: the client's error if the server does not answer.
    """
    settings = (f"weights={weights}", f"kv_dtype={kv_dtype}", "share_prefixes=false")
    with running_server(str(model_dir), *settings) as address:
        return asyncio.run(_measure(address, context_len, num_rows, decode_s))


async def _measure(address: str, context_len: int, num_rows: int, decode_s: float) -> ServingCost:
    async with AsyncClient(address) as client:
        sessions = [client.session() for _ in range(num_rows)]
        for session in sessions:
            await session.turn([token_at(at) for at in range(context_len)], max_tokens=0).wait()
        turn_s = median([await _empty_s(sessions[0]) for _ in range(_NUM_EMPTY)])
        served_s = min([await _served_decode_s(sessions, context_len) for _ in range(_NUM_ROUNDS)])
        beside = [client.session() for _ in range(MOST_ROWS)]
        for session in beside:
            await session.turn([token_at(0)], max_tokens=0).wait()
        turn_hold_s = median([await _turn_hold_s(sessions[0], beside, context_len) for _ in range(_NUM_ROUNDS)])
        return ServingCost(turn_s, max(turn_hold_s, 0.0), max((served_s - decode_s) / num_rows, 0.0))


async def _empty_s(session: AsyncSession) -> float:
    """Seconds of an empty turn."""
    started_s = time.perf_counter()
    await session.turn(None, max_tokens=0).wait()
    return time.perf_counter() - started_s


async def _together_s(sessions: Sequence[AsyncSession], num_output: int, context_len: int) -> float:
    """Seconds until turns of all sessions, sent at the same time from the same context, have ended."""
    started_s = time.perf_counter()
    turns = [
        session.turn([token_at(0)], max_tokens=num_output, ignore_eos=True, rewind_to=context_len)
        for session in sessions
    ]
    await asyncio.gather(*(turn.wait() for turn in turns))
    return time.perf_counter() - started_s


async def _served_decode_s(sessions: Sequence[AsyncSession], context_len: int) -> float:
    """Seconds of a step in which each session computes a token, including sending the tokens."""
    short_s = await _together_s(sessions, 1, context_len)
    return (await _together_s(sessions, 1 + _NUM_LONGER, context_len) - short_s) / _NUM_LONGER


async def _turn_hold_s(decoding: AsyncSession, beside: Sequence[AsyncSession], context_len: int) -> float:
    """Seconds by which an empty turn of another session delays a decoding session."""
    alone_s = await _together_s([decoding], _NUM_DECODED, context_len)
    is_over = asyncio.Event()
    started_s = time.perf_counter()
    keeping = [
        asyncio.create_task(
            _keep_alive(session, started_s + number / _EMPTY_PER_S, len(beside) / _EMPTY_PER_S, is_over)
        )
        for number, session in enumerate(beside)
    ]
    disturbed_s = await _together_s([decoding], _NUM_DECODED, context_len)
    is_over.set()
    return (disturbed_s - alone_s) / sum(await asyncio.gather(*keeping))


async def _keep_alive(session: AsyncSession, due_s: float, period_s: float, is_over: asyncio.Event) -> int:
    """Sends empty turns until `is_over` is set; returns their number."""
    num_turns = 0
    while True:
        await asyncio.sleep(due_s + num_turns * period_s - time.perf_counter())
        if is_over.is_set():
            return num_turns
        await session.turn(None, max_tokens=0).wait()
        num_turns += 1
