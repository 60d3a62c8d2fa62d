"""Several clients at once do at random what sessions can do, through the real server, in a pool too small for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedModel

from support.oracle import check_greedy
from support.processes import model_process_ids
from support.random_client import MAX_CONTEXT, MAX_QUEUED_TURNS, RandomClient
from support.share import IN_FLOAT32, model_server

SEED = "random sessions 1"
NUM_CLIENTS = 6
NUM_ACTIONS = 40
NUM_TRANSCRIPTS = 12


@pytest.fixture(scope="module")
def crowded_server(smollm2_dir: str) -> Iterator[str]:
    """Three of the sessions fit in its pool."""
    settings = (f"max_context={MAX_CONTEXT}", f"kv_tokens={3 * MAX_CONTEXT}", f"max_queued_turns={MAX_QUEUED_TURNS}")
    with model_server(smollm2_dir, *settings, "share_prefixes=true", *IN_FLOAT32) as server:
        yield server.address


def test_whatever_sessions_do_each_has_the_context_that_its_client_knows(
    crowded_server: str, smollm2: PreTrainedModel
) -> None:
    model_processes = model_process_ids()
    clients = [RandomClient(crowded_server, f"{SEED}, client {number}") for number in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        runs = [pool.submit(client.run, NUM_ACTIONS) for client in clients]
        for number, run in enumerate(runs):
            if (error := run.exception()) is not None:
                error.add_note(f"seed {SEED!r}, client {number}")
                raise error
    assert model_process_ids() == model_processes

    num_done = sum((client.num_done for client in clients), Counter[str]())
    actions = {"take_turn", "take_turns_at_once", "interrupt", "leave", "repeat", "err", "close", "start_anew"}
    ends = {"length", "append", "interrupted", "CONTEXT_FULL", "FAILED_PRECONDITION"}
    assert actions | ends <= set(num_done), num_done

    transcripts = [transcript for client in clients for transcript in client.transcripts]
    for transcript in sorted(transcripts, key=lambda transcript: -len(transcript.generated))[:NUM_TRANSCRIPTS]:
        assert transcript.generated
        check_greedy(smollm2, transcript.context, transcript.generated)
