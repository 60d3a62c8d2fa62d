"""`make soak`: sixteen people open sessions, talk, interrupt and vanish, for ten minutes, on the real server.

Afterwards the server must have the memory that it had after the first minute, every page and every place for a session
must be free, and nobody may have waited in vain. The KV pool is smaller than the sessions want, so that there is
pressure all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median

import psutil
from tqdm import tqdm

from load_tests.bench.pictures import draw_soak
from load_tests.bench.results import write_result
from microturn.serve.child import running_server
from microturn_client import AsyncClient, AsyncSession, ContextFull, MicroturnError, Tokens

NUM_USERS = 16
KV_TOKENS = 4096
MAX_SESSIONS = 128
MAX_CONTEXT = 512
IDLE_TIMEOUT_S = 5.0
TURN_TIMEOUT_S = 30.0
FILL_TIMEOUT_S = 300.0  # a prompt of the whole pool is one long computation, on a machine that may do other things too
MOST_GROWTH = 0.02
SENTENCE = "the river runs slowly past our small house while the children play under an old apple tree in the sun"


@dataclass
class Tally:
    """What the users did and met."""

    did: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Soaked:
    """What came of it.

    Attributes:
        did: how often the users did what.
        errors: what they were told, by code.
        memory_mb: of all the server's processes, once a second.
        num_acts: what the users had done by then.
        memory_growth: from the second minute to the last one, as a share.
        failures: what must hold and did not.
    """

    did: dict[str, int]
    errors: dict[str, int]
    memory_mb: list[float]
    num_acts: list[int]
    memory_growth: float
    failures: list[str]


def main() -> int:
    """Runs the soak; the exit code says whether all that must hold held."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.soak", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a directory or an embedded model (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    settings = (f"kv_tokens={KV_TOKENS}", f"max_context={KV_TOKENS}", f"max_sessions={MAX_SESSIONS}")
    with running_server(arguments.model, *settings) as address:
        soaked = asyncio.run(_soak(address, arguments.minutes * 60, arguments.seed))
    result = {"protocol": __doc__, "seed": arguments.seed, **asdict(soaked)}
    print(f"\n{write_result('soak', result)}\n{draw_soak('soak', soaked.memory_mb, soaked.num_acts)}")
    print(f"did: {soaked.did}\nerrors: {soaked.errors}\nmemory after the first minute: {soaked.memory_growth:+.2%}")
    print(*soaked.failures or ["all that must hold held"], sep="\n")
    return 1 if soaked.failures else 0


async def _soak(address: str, duration_s: float, seed: int) -> Soaked:
    tally = Tally()
    async with AsyncClient(address, timeout_s=TURN_TIMEOUT_S) as client:
        await _fill_the_pool(client)  # so that all memory has been touched that ever will be
        end_s = time.monotonic() + duration_s
        users = [
            asyncio.create_task(_user(client, random.Random(f"{seed}.{user}"), end_s, tally))
            for user in range(NUM_USERS)
        ]
        memory_mb, num_acts = await _watch(tally, end_s)
        failures = [
            f"a user failed: {error!r}" for error in await asyncio.gather(*users, return_exceptions=True) if error
        ]
        await asyncio.sleep(2 * IDLE_TIMEOUT_S)
        failures += await _left_behind(client)
    per_minute = [median(memory_mb[first : first + 60]) for first in range(0, len(memory_mb), 60)]
    growth = per_minute[-1] / per_minute[min(1, len(per_minute) - 1)] - 1
    if growth > MOST_GROWTH:
        failures.append(f"the server's memory grew by {growth:.1%} after the first minute")
    if unexpected := set(tally.errors) - {"CONTEXT_FULL"}:
        failures.append(f"errors: {', '.join(sorted(unexpected))}")
    return Soaked(dict(tally.did), dict(tally.errors), memory_mb, num_acts, growth, failures)


async def _user(client: AsyncClient, chance: random.Random, end_s: float, tally: Tally) -> None:
    while time.monotonic() < end_s:
        ending = chance.choice(["close", "close", "vanish in a turn", "fall silent"])
        await _life(client, chance, ending, tally)
        tally.did[ending] += 1
        await asyncio.sleep(chance.random())


async def _life(client: AsyncClient, chance: random.Random, ending: str, tally: Tally) -> None:
    """One session from its first turn to its end; without `close` its stream just breaks."""
    session = client.session(idle_timeout_s=IDLE_TIMEOUT_S, max_context=MAX_CONTEXT)
    for _ in range(chance.randint(1, 12)):
        act = chance.choice([_listen, _talk, _talk, _barge_in])
        try:
            await act(session, chance)
        except ContextFull:
            tally.errors["CONTEXT_FULL"] += 1
            await session.append("Again.", rewind_to=32)
        except MicroturnError as error:
            tally.errors[error.code] += 1
            break
        tally.did[act.__name__.strip("_")] += 1
        await asyncio.sleep(0.5 * chance.random())
    match ending:
        case "close":
            await session.close()
        case "vanish in a turn":
            await anext(session.turn(_words(chance), max_tokens=64, ignore_eos=True), None)


async def _listen(session: AsyncSession, chance: random.Random) -> None:
    await session.append(_words(chance))


async def _talk(session: AsyncSession, chance: random.Random) -> None:
    await session.turn(_words(chance), max_tokens=chance.randint(1, 12), ignore_eos=True).wait()


async def _barge_in(session: AsyncSession, chance: random.Random) -> None:
    """Talks over an answer: what was not heard of it goes, what is said instead follows on what was."""
    answer = session.turn(_words(chance), max_tokens=40, ignore_eos=True)
    heard_to = None
    async for event in answer:
        if isinstance(event, Tokens) and event.ids:
            heard_to = event.position + len(event.ids) // 2
            if chance.random() < 0.3:
                break
    assert heard_to is not None, "an answer without tokens"
    status = await session.turn(_words(chance), max_tokens=4, on_overlap="interrupt", rewind_to=heard_to).wait()
    assert status.context_len >= heard_to


def _words(chance: random.Random) -> str:
    return " " + " ".join(chance.choices(SENTENCE.split(), k=chance.randint(1, 24)))


async def _watch(tally: Tally, end_s: float) -> tuple[list[float], list[int]]:
    """Once a second, until the end: the memory of all the server's processes in MB, and what was done so far."""
    server = psutil.Process().children(recursive=True)
    memory_mb, num_acts = [], []
    with tqdm(total=round(end_s - time.monotonic()), desc="soak", unit="s") as progress:
        while time.monotonic() < end_s:
            memory_mb.append(sum(process.memory_info().rss for process in server) / 1e6)
            num_acts.append(sum(tally.did.values()))
            progress.set_postfix(memory=f"{memory_mb[-1]:.0f} MB", acts=num_acts[-1], errors=sum(tally.errors.values()))
            progress.update()
            await asyncio.sleep(1)
    return memory_mb, num_acts


async def _left_behind(client: AsyncClient) -> list[str]:
    """What is wrong with a server whose clients have all gone: pages or places that are not free."""
    failures = []
    try:
        await _fill_the_pool(client)
    except MicroturnError as error:
        failures.append(f"pages were lost: {error}")
    sessions = [client.session() for _ in range(MAX_SESSIONS)]
    places = await asyncio.gather(*(session.append("Hello") for session in sessions), return_exceptions=True)
    if refused := [place for place in places if isinstance(place, BaseException)]:
        failures.append(f"{len(refused)} sessions are stuck: {refused[0]}")
    await asyncio.gather(*(session.close() for session in sessions))
    return failures


async def _fill_the_pool(client: AsyncClient) -> None:
    """One session that needs every page."""
    async with client.session(timeout_s=FILL_TIMEOUT_S) as session:
        await session.turn(range(KV_TOKENS - 1), max_tokens=1).wait()


if __name__ == "__main__":
    sys.exit(main())
