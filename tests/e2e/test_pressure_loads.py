"""Random loads of turns without options, on pools of one to four contexts: every turn is answered.

What users do first, under the settings that they run: sessions of any length open, append and ask at the same time, and
prefixes are shared. `--loads` says how many loads there are in all; where they are fewer than the pools, the last pools
have none.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from microturn_client import AsyncClient, AsyncSession
from support.share import model_server

MAX_CONTEXT = 1024
# `kv_tokens` and `host_tier_bytes`; the first two are as unlike as they can be.
POOLS = [(1024, 30_000_000), (4096, 0), (1024, 0), (2048, 0), (2048, 30_000_000), (4096, 30_000_000)]
# The time in which a turn must be answered: a hundred times what it takes.
TIMEOUT_S = 60.0
DEFAULT_MAX_TOKENS = 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each pool with its number of loads."""
    num_loads: int = metafunc.config.getoption("loads")
    shares = [len(range(index, num_loads, len(POOLS))) for index in range(len(POOLS))]
    cases = [(*pool, share) for pool, share in zip(POOLS, shares, strict=True) if share]
    metafunc.parametrize(("kv_tokens", "host_tier_bytes", "num_loads"), cases)


def test_every_turn_of_a_random_load_is_answered(
    smollm2_dir: str, kv_tokens: int, host_tier_bytes: int, num_loads: int
) -> None:
    """A page that the prefix cache and a session shared counted as taken for good: two of 60 such loads stood still."""
    settings = (f"max_context={MAX_CONTEXT}", f"kv_tokens={kv_tokens}", f"host_tier_bytes={host_tier_bytes}")
    with model_server(smollm2_dir, *settings) as server:
        for seed in range(num_loads):
            try:
                asyncio.run(_load(server.address, random.Random(f"{kv_tokens}, {host_tier_bytes}, {seed}")))
            except Exception as error:
                error.add_note(f"load {seed} of kv_tokens={kv_tokens} host_tier_bytes={host_tier_bytes}")
                raise


async def _load(address: str, rng: random.Random) -> None:
    async with AsyncClient(address) as client:
        sessions = [client.session(timeout_s=TIMEOUT_S) for _ in range(rng.randint(3, 6))]
        talks = [_talk(session, random.Random(rng.random())) for session in sessions]
        await asyncio.gather(*talks)
        await asyncio.gather(*(session.close() for session in sessions))


async def _talk(session: AsyncSession, rng: random.Random) -> None:
    """One long turn, mostly of whole pages, and short ones behind it; what it answers is as long as what it says."""
    context_len = 0
    given = [rng.choice((1, 2, 3))] * 32 + [rng.randrange(1000) for _ in range(rng.randint(1, 36) * 16 - 31)]
    for _ in range(rng.randint(2, 4)):
        asks = rng.random() < 0.6
        if context_len + len(given) + DEFAULT_MAX_TOKENS > MAX_CONTEXT:
            return
        status = await (session.turn(given).wait() if asks else session.append(given))
        context_len += len(given) + status.usage.output_tokens
        assert status.context_len == context_len
        await asyncio.sleep(rng.choice((0, 0, 0.05)))
        given = [rng.randrange(1000) for _ in range(rng.choice((1, 4, 17, 60)))]
