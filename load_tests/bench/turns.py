"""The turn protocol: S conversations in parallel, closed loop, 16 new tokens in and exactly 8 out per turn.

Wall time per turn at the client, the mean over the conversations. A streaming session and a server that finds prefixes
take every turn. A stateless turn and one of a plain loop take seconds and do not depend on how the turns before were
taken. So of these two only some are measured: the first eleven, then each so many-th, of a plain loop also the last
ten. What lies between is put into the conversation at once, and all conversations take the next measured turn together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

from tqdm import tqdm

from load_tests.bench.bystanders import bystanders, warning
from load_tests.bench.pictures import draw_turns
from load_tests.bench.results import percentile, print_table, write_result
from load_tests.bench.serving import OWN_MODES, Served, serving
from load_tests.bench.talks import Service, Talk

NUM_INPUT, NUM_OUTPUT = 16, 8
_NUM_FIRST, _NUM_LAST = 11, 10
Progress: TypeAlias = "tqdm[NoReturn]"
Run: TypeAlias = dict[int, float]


def run_turns(served: Served, modes: Sequence[str], num_turns: int, num_runs: int, sampled_every: int) -> None:
    """Measures all modes side by side, run by run; writes a JSON file, a picture and a table.

    Args:
        served: what is served.
        modes: of `serving`; the first is the one that others are held against.
        num_turns: turns of each conversation.
        num_runs: how often everything is measured.
        sampled_every: of modes that are sampled, each so many-th turn is measured.
    """
    num_sessions = served.num_sessions
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    others: dict[str, list[float]] = {mode: [] for mode in modes}
    for run in range(num_runs):
        for mode in modes:
            measured = measured_turns(mode, num_turns, sampled_every)
            label = f"run {run + 1}/{num_runs} {mode:9}"
            with (
                serving(mode, served) as service,
                tqdm(total=num_sessions * num_turns, desc=label, unit="turn", leave=False) as progress,
            ):
                with bystanders() as seen:
                    runs[mode].append(asyncio.run(_measure(service, num_sessions, measured, progress)))
                others[mode].append(seen.share)
    summaries = {mode: summary(of, num_turns) for mode, of in runs.items()}
    first_ms, last_ms = summaries[modes[0]]
    rows = [
        [mode, first, last, f"{first / first_ms:.1f}, {last / last_ms:.1f}", warning(max(others[mode]))]
        for mode, (first, last) in summaries.items()
    ]
    print(f"\n{num_sessions} sessions, {NUM_INPUT} tokens in, {NUM_OUTPUT} out; ms a turn, median of {num_runs} runs")
    header = [
        "mode",
        f"turns 2 to {_NUM_FIRST}",
        f"turns {num_turns - _NUM_LAST + 1} to {num_turns}",
        "times as long",
        "",
    ]
    print_table(header, rows)
    name = f"{'turns' if set(modes) <= set(OWN_MODES) else 'peers-turns'}-{num_sessions}x{num_turns}{served.suffix}"
    result = {
        "protocol": __doc__,
        "model": served.model,
        "settings": served.settings,
        "num_sessions": num_sessions,
        "num_turns": num_turns,
        "sampled_every": sampled_every,
        "first_and_last_ms": summaries,
        "others_share_of_processor": others,
        "ms": runs,
    }
    print("written:", write_result(name, result))
    print("drawn:  ", draw_turns(name, runs, num_sessions, NUM_INPUT + NUM_OUTPUT))


def measured_turns(mode: str, num_turns: int, sampled_every: int) -> list[int]:
    """The numbers of the turns that a mode measures, from 1 on."""
    if mode not in ("stateless", "plain"):
        return list(range(1, num_turns + 1))
    first_of_last = num_turns if mode == "stateless" else num_turns - _NUM_LAST + 1
    return [
        turn
        for turn in range(1, num_turns + 1)
        if turn <= _NUM_FIRST or turn % sampled_every == 0 or turn >= first_of_last
    ]


def summary(runs: Sequence[Mapping[int, float]], num_turns: int) -> tuple[float, float]:
    """Median over the runs of the mean over the first turns but one, and over what was measured of the last ten."""
    spans = range(2, _NUM_FIRST + 1), range(num_turns - _NUM_LAST + 1, num_turns + 1)
    first, last = ([_mean([ms for turn, ms in run.items() if turn in span]) for run in runs] for span in spans)
    return percentile(first, 50), percentile(last, 50)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def _measure(service: Service, num_sessions: int, measured: Sequence[int], progress: Progress) -> Run:
    """One run of one mode: milliseconds of each measured turn, the mean over the conversations."""
    together = asyncio.Barrier(num_sessions)
    talks = [service.open() for _ in range(num_sessions)]
    try:
        latencies_ms = await asyncio.gather(
            *(_converse(talk, seed, measured, together, progress) for seed, talk in enumerate(talks))
        )
    finally:
        await asyncio.gather(*(talk.close() for talk in talks))
    return {turn: _mean([of[turn] for of in latencies_ms]) for turn in measured}


async def _converse(
    talk: Talk, seed: int, measured: Sequence[int], together: asyncio.Barrier, progress: Progress
) -> Run:
    latencies_ms: Run = {}
    last = 0
    for turn in measured:
        if turn > last + 1:
            await talk.skip([token for skipped in range(last + 1, turn) for token in _stand_in(seed, skipped)])
            progress.update(turn - last - 1)
            await together.wait()
        started_s = time.perf_counter()
        await talk.turn(turn_input(seed, turn), NUM_OUTPUT)
        latencies_ms[turn] = (time.perf_counter() - started_s) * 1e3
        progress.update()
        last = turn
    return latencies_ms


def turn_input(seed: int, turn: int, num_tokens: int = NUM_INPUT) -> list[int]:
    """A turn's tokens; the same in every mode."""
    return random.Random(seed * 100_003 + turn).choices(range(1000, 40_000), k=num_tokens)


def _stand_in(seed: int, turn: int) -> list[int]:
    """What a turn that is not taken would have left: its tokens, and some others for its answer."""
    return turn_input(seed, turn) + turn_input(seed, -turn, NUM_OUTPUT)
