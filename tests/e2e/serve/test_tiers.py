"""A real server whose sessions do not fit its pool: their KV, in 8 bits, goes to host memory and files, and returns."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from microturn.serve.options import default_model_repository
from microturn_client import Client, Session, Tokens, TurnEnd
from support import share
from support.scrape import scrape_until
from support.served import Served

NUM_SESSIONS = 12
# Of SmolLM2-135M in int8, scales included.
BYTES_PER_TOKEN = 12_240
# Each session takes five pages of sixteen tokens from its first turn to its last: two of them fit the pool.
SETTINGS = {
    "kv_dtype": "int8",
    "kv_tokens": 192,
    "max_context": 128,
    "share_prefixes": "false",
    # Room for all, so that none is lost; files get what exceeds three quarters of it.
    "host_tier_bytes": NUM_SESSIONS * 80 * BYTES_PER_TOKEN,
}


def test_kv_that_was_away_is_as_it_was(serve: Callable[..., Served], smollm2_dir: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "num_threads": share.num_threads(), "disk_tier_dir": str(tmp_path / "tier")}
    served = serve(
        f"--model-repository={default_model_repository()}",
        f"--model={smollm2_dir}",
        *(argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")),
    )
    served.wait_until_ready(60)
    rng = random.Random(5)
    inputs = [[rng.choices(range(1000, 40_000), k=num) for num in (64, 2, 2)] for _ in range(NUM_SESSIONS)]
    with Client(served.address) as client:
        expected = []
        for given in inputs:
            with client.session() as session:  # alone, and never away
                expected.append([take_turn(session, chunk) for chunk in given])
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(client.session()) for _ in inputs]
            answers: list[list[list[int]]] = [[] for _ in inputs]
            for number in range(3):
                # First those that were moved out long ago, then those that were so just now.
                for index in range(NUM_SESSIONS) if number < 2 else reversed(range(NUM_SESSIONS)):
                    answers[index].append(take_turn(sessions[index], inputs[index][number]))
            assert answers == expected
            page = scrape_until(
                served.metrics_url,
                lambda page: (
                    page.sum("microturn_kv_restores_total", source="disk")
                    and page.sum("microturn_kv_restores_total", source="host")
                ),
            )
    assert page.sum("microturn_kv_evictions_total", to="tokens") == 0
    assert page.sum("microturn_kv_file_errors_total") == 0


def take_turn(session: Session, given: list[int]) -> list[int]:
    """What a turn answers; nothing that came before it is computed again."""
    answer: list[int] = []
    for event in session.turn(given, max_tokens=3, ignore_eos=True):
        match event:
            case Tokens():
                answer += event.ids
            case TurnEnd(status):
                # The last token of an answer has its KV with the next turn.
                assert status.usage.computed_tokens <= len(given) + 3
    return answer
