"""The beat protocol: N sessions, open loop, a turn every 200 ms each, their phases spread; 4 tokens in, 4 out.

The sessions hold 400 tokens when a level begins, and 40 more with every second. A turn is on time when its last token
is at the client within 200 ms of its *scheduled* arrival, whenever it could be sent: one that has to wait for the turn
before it, or for this program, is late all the same. Capacity is the largest N with 99 % on time.

A level that falls 2 s behind ends there, since nobody would have waited. Turns that were due by then and have no answer
count as late, with the time that they had waited; those due in the last 200 ms are not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low

from tqdm import tqdm

from load_tests.bench.beat_level import BEAT_S, Level, keep_beat
from load_tests.bench.bystanders import bystanders, warning
from load_tests.bench.pictures import draw_beat
from load_tests.bench.results import percentile, print_table, write_result
from load_tests.bench.serving import OWN_MODES, Served, serving
from load_tests.bench.talks import Service, Talk
from load_tests.bench.turns import turn_input

NUM_INPUT, NUM_OUTPUT, OPENING_LEN = 4, 4, 400
WANTED_SHARE = 0.99
# Below this share nothing is to be expected of more sessions.
_HOPELESS_SHARE = 0.5


@dataclass(frozen=True)
class Conversations:
    """What sessions do; the defaults are the beat protocol's.

    Attributes:
        beat_s: between two turns of a session.
        num_input: tokens in, per turn.
        num_output: tokens out, per turn.
        opening_len: tokens that a session holds when a level begins.
    """

    beat_s: float = BEAT_S
    num_input: int = NUM_INPUT
    num_output: int = NUM_OUTPUT
    opening_len: int = OPENING_LEN


def run_beat(served: Served, modes: Sequence[str], level_s: float, num_runs: int) -> None:
    """Sweeps the number of sessions, all modes side by side; writes a JSON file, a picture and a table.

    Args:
        served: what is served; a sweep ends at its number of sessions at the latest.
        modes: of `serving`.
        level_s: seconds of each level.
        num_runs: how often everything is measured.
    """
    sweeps: dict[str, list[list[Level]]] = {mode: [] for mode in modes}
    for run in range(num_runs):
        for mode in modes:
            label = f"run {run + 1}/{num_runs} {mode}"
            with serving(mode, served) as service:
                sweeps[mode].append(asyncio.run(_sweep(service, served.num_sessions, level_s, label)))
    capacities = {mode: [capacity(sweep) for sweep in of] for mode, of in sweeps.items()}
    print(f"\na turn every {BEAT_S * 1e3:.0f} ms, {NUM_INPUT} tokens in, {NUM_OUTPUT} out; median of {num_runs} runs")
    for mode, of in sweeps.items():
        print(f"\n{mode}: {median_low(capacities[mode])} sessions with {WANTED_SHARE:.0%} on time")
        print_table(["sessions", "on time", "p50, ms", "p99, ms", ""], [_cells(levels) for levels in by_sessions(of)])
    result = {
        "protocol": __doc__,
        "model": served.model,
        "settings": served.settings,
        "level_s": level_s,
        "capacity": {mode: median_low(of) for mode, of in capacities.items()},
        "capacities": capacities,
        "levels": {mode: [[level.as_json() for level in sweep] for sweep in of] for mode, of in sweeps.items()},
    }
    name = ("beat" if set(modes) <= set(OWN_MODES) else "peers-beat") + served.suffix
    print("\nwritten:", write_result(name, result))
    print("drawn:  ", draw_beat(name, {mode: by_sessions(of) for mode, of in sweeps.items()}, WANTED_SHARE))


def capacity(sweep: Sequence[Level]) -> int:
    """The largest number of sessions with enough turns on time."""
    return max((level.num_sessions for level in sweep if level.on_time_share >= WANTED_SHARE), default=0)


def by_sessions(sweeps: Sequence[Sequence[Level]]) -> list[list[Level]]:
    """The levels of all runs, by their number of sessions."""
    levels: dict[int, list[Level]] = {}
    for sweep in sweeps:
        for level in sweep:
            levels.setdefault(level.num_sessions, []).append(level)
    return [levels[num_sessions] for num_sessions in sorted(levels)]


async def _sweep(service: Service, most_sessions: int, level_s: float, label: str) -> list[Level]:
    """One session, then two, until two levels have failed or one badly."""
    levels: list[Level] = []
    failed = 0
    with tqdm(total=most_sessions, desc=label, unit="level", leave=False) as progress:
        for num_sessions in range(1, most_sessions + 1):
            levels.append(level := await take_level(service, num_sessions, level_s))
            progress.set_postfix_str(f"{num_sessions} sessions: {level.on_time_share:.0%} on time")
            progress.update()
            failed = failed + 1 if level.on_time_share < WANTED_SHARE else 0
            if failed == 2 or level.on_time_share < _HOPELESS_SHARE:
                break
    return levels


async def take_level(
    service: Service, num_sessions: int, level_s: float, conversations: Conversations = Conversations()
) -> Level:
    """Opens so many sessions and lets them keep their beat.

    Args:
        service: whoever answers.
        num_sessions: at once.
        level_s: seconds, in whole beats.
        conversations: what they do.
    """
    # Each level says something new, so that no server finds in a cache what it would have to compute.
    talks = {1000 * num_sessions + index: service.open() for index in range(num_sessions)}
    opening_len = conversations.opening_len - conversations.num_output
    try:
        for seed, talk in talks.items():
            await talk.turn(turn_input(seed, 0, opening_len), conversations.num_output)
        takers = [partial(_take_turn, talk, seed, conversations) for seed, talk in talks.items()]
        with bystanders() as seen:
            level = await keep_beat(takers, round(level_s / conversations.beat_s), conversations.beat_s)
        return replace(level, others_share=seen.share)
    finally:
        await asyncio.gather(*(talk.close() for talk in talks.values()))


async def _take_turn(talk: Talk, seed: int, conversations: Conversations, number: int) -> None:
    await talk.turn(turn_input(seed, number, conversations.num_input), conversations.num_output)


def _cells(levels: Sequence[Level]) -> list[object]:
    share = percentile([level.on_time_share for level in levels], 50)
    middle, high = (percentile([level.percentile(percent) for level in levels], 50) for percent in (50, 99))
    others = warning(max(level.others_share for level in levels))
    return [levels[0].num_sessions, f"{share:.1%}", middle, high, others]
