"""A model over three processes behind the real server: they answer as one, are saved as one, and die as one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from microturn_client import Client, Tokens, Unavailable
from support.oracle import stock_greedy
from support.raw import RawStream, ids
from support.served import Served, Start, servers_of

NUM_RANKS = 3  # the model has three key-value heads
GREEDY = {"max_tokens": 6, "ignore_eos": True}
PROMPT = list(range(1000, 1040))


@pytest.fixture(scope="module")
def serve_shared(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: str) -> Iterator[Start]:
    """Starts the real model over three processes, in float32."""
    settings = {"weights": "float32", "kv_dtype": "float32", "kv_tokens": 2048, "max_context": 1024}
    settings |= {"tensor_parallel": NUM_RANKS}
    with servers_of(smollm2_dir, partial(tmp_path_factory.mktemp, "run"), **settings) as start:
        yield start


def ranks_of(served: Served) -> list[psutil.Process]:
    """The processes of a server's other ranks."""
    return [process for process in served.tree() if "microturn.model.parallel.follower" in process.cmdline()]


def generate(client: Client) -> list[int]:
    """What a new session answers to the prompt, in two pieces."""
    with client.session() as session:
        session.append(PROMPT[:17])
        return [i for event in session.turn(PROMPT[17:], **GREEDY) if isinstance(event, Tokens) for i in event.ids]


def test_a_lost_rank_is_replaced_with_all_others(serve_shared: Start, smollm2: PreTrainedModel) -> None:
    served = serve_shared()
    served.wait_until_ready(120)
    expected = stock_greedy(smollm2, PROMPT, GREEDY["max_tokens"])
    with Client(served.address, recovery=None) as client, client.session() as session:
        assert generate(client) == expected
        session.append(PROMPT)
        before = ranks_of(served)
        assert len(before) == NUM_RANKS - 1
        before[1].kill()
        served.wait_for_health("NOT_SERVING")
        with pytest.raises(Unavailable):
            session.append([5])
        served.wait_for_health("SERVING", 120)
        assert not any(process.is_running() for process in before), "a rank has outlived the others"
        assert generate(client) == expected
    assert len(ranks_of(served)) == NUM_RANKS - 1
    assert any("rank 2 has ended with -9" in line for line in served.said)


def test_what_all_ranks_have_is_saved_and_goes_on(serve_shared: Start, tmp_path: Path) -> None:
    where = f"--snapshot-dir={tmp_path}"
    served = serve_shared(where)
    served.wait_until_ready(120)
    with RawStream(served.address) as stream:
        first = stream.ask("talk", start=True, options=dict(GREEDY), input_ids=ids(*PROMPT))
        assert first.error is None
        expected = stream.ask("other", start=True, options=dict(GREEDY), input_ids=ids(*PROMPT, *first.token_ids, 7, 8))
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0
    again = serve_shared(where)
    again.wait_until_ready(120)
    with RawStream(again.address) as stream:
        resumed = stream.ask("talk", start=True, options=GREEDY | {"resume": True}, input_ids=ids(7, 8))
    assert resumed.error is None, resumed.error
    assert resumed.token_ids == expected.token_ids
    assert resumed.status["usage"]["computed_tokens"] == 1 + 2 + 5, "the past was computed again"
