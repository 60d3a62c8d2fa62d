"""Many sessions that begin with one long prompt: what does the second one's first turn cost?

Sessions open one after another on the real server. Each first turn brings the same prompt and a few tokens of its own,
and generates one. Once with shared prefixes, on a pool far too small for as many copies of the prompt; once without,
on a pool for all. Then every session takes a second turn: what it has to compute again tells whether the prompt was
still there for all of them.
"""

from __future__ import annotations

import random
import time
from statistics import median

from tqdm import tqdm

from load_tests.bench.results import print_table, write_result
from microturn.serve.child import running_server
from microturn_client import Client, Session, TurnEnd

NUM_OWN = 16


def run_prefixes(model: str, num_sessions: int, prompt_len: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_sessions: that open, one after another.
        prompt_len: tokens that all of them begin with.
    """
    max_context = prompt_len + 100
    shared_tokens = prompt_len + num_sessions * 48
    figures = {
        "shared": _measure(model, num_sessions, prompt_len, "share_prefixes=true", f"kv_tokens={shared_tokens}"),
        "apart": _measure(
            model, num_sessions, prompt_len, "share_prefixes=false", f"kv_tokens={num_sessions * max_context}"
        ),
    }
    rows = []
    for name, (first_ms, computed) in figures.items():
        rows.append([name, first_ms[0], median(first_ms[1:]), max(first_ms[1:]), sum(computed) / len(computed)])
    print(f"\n{num_sessions} sessions that begin with the same {prompt_len} tokens, and {NUM_OWN} of their own")
    print_table(["KV", "first session, ms", "the others, p50", "max", "computed in the second turn, tokens"], rows)
    ratio = median(figures["apart"][0][1:]) / median(figures["shared"][0][1:])
    print(f"first turns after the first: {ratio:.1f} times faster with a shared prompt")
    print(f"pool of the shared run: {shared_tokens} tokens; {num_sessions} prompts apart: {num_sessions * prompt_len}")
    result = {
        "protocol": __doc__,
        "model": model,
        "num_sessions": num_sessions,
        "prompt_len": prompt_len,
        "pool_tokens_shared": shared_tokens,
        "times_faster": ratio,
        "first_turn_ms": {name: first_ms for name, (first_ms, _) in figures.items()},
        "computed_in_second_turn": {name: computed for name, (_, computed) in figures.items()},
    }
    print("written:", write_result("prefixes", result))


def _measure(model: str, num_sessions: int, prompt_len: int, *settings: str) -> tuple[list[float], list[int]]:
    """Milliseconds of each session's first turn, and the tokens that its second one computed."""
    prompt = random.Random(0).choices(range(1000, 40_000), k=prompt_len)
    own = [random.Random(number).choices(range(1000, 40_000), k=NUM_OWN) for number in range(num_sessions)]
    first_ms, sessions, computed = [], [], []
    with running_server(model, f"max_context={prompt_len + 100}", *settings) as address, Client(address) as client:
        for given in tqdm(own, desc=settings[0], unit="session", leave=False):
            session = client.session(idle_timeout_s=600)
            sessions.append(session)
            started_s = time.perf_counter()
            _computed(session, prompt + given)
            first_ms.append((time.perf_counter() - started_s) * 1e3)
        for session, given in zip(sessions, own, strict=True):
            computed.append(_computed(session, given))
        for session in sessions:
            session.close()
    return first_ms, computed


def _computed(session: Session, given: list[int]) -> int:
    """Takes a turn; the tokens that it computed."""
    (end,) = (event for event in session.turn(given, max_tokens=1) if isinstance(event, TurnEnd))
    return end.status.usage.computed_tokens
