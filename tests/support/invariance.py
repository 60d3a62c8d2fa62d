"""Oracle 2 to the bit: the logits of some sessions, alone or in company, in whatever pieces, and how they compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.model.runner import ModelRunner
from microturn.sessions.turn import SessionId
from support.driver import model_runner
from support.models import VOCAB_SIZE
from support.oracle import RecordingDriver

NUM_SESSIONS = 4
NUM_TURNS = 3
PAGE_SIZE = 16
MAX_CONTEXT = 350
# Every session fits such a pool by itself, and two of them do not.
FEW_PAGES = -(-2 * MAX_CONTEXT // PAGE_SIZE) - 1

Logits = dict[tuple[SessionId, int], Tensor]


def logits_of(
    model: PreTrainedModel,
    sessions: Iterable[int],
    *,
    max_batch_tokens: int,
    num_pages: int = 256,
    kv_dtype: torch.dtype = torch.float32,
    new_runner: Callable[..., ModelRunner] = model_runner,
) -> Logits:
    """The logits that the tokens of some sessions are sampled from; what a session is told depends on it alone."""
    runner = new_runner(model, num_pages=num_pages, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    driver = RecordingDriver(
        runner, num_pages=num_pages, page_size=PAGE_SIZE, max_context=MAX_CONTEXT, max_batch_tokens=max_batch_tokens
    )
    prompts = {session: random.Random(session) for session in sessions}
    for number in range(NUM_TURNS):
        for session, rng in prompts.items():
            given = [rng.randrange(17, min(VOCAB_SIZE, 49152)) for _ in range(rng.choice([3, 60, 90]))]
            driver.post(session, given, start=number == 0, max_tokens=5, ignore_eos=True)
        driver.run()
    return driver.logits


def require_equal(got: Logits, expected: Logits) -> None:
    """Raises `AssertionError` where a bit of all sessions' logits differs."""
    assert got.keys() == expected.keys()
    assert len(got) == NUM_SESSIONS * NUM_TURNS * 5
    differing = [at for at in got if not torch.equal(got[at], expected[at])]
    assert not differing
