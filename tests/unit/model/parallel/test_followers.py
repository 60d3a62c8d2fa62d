"""The processes of the other ranks: they come, they end with this one, and a lost one is told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from queue import SimpleQueue

import psutil
import pytest
import torch

from microturn.errors import InvalidArgument
from microturn.model.batch import Batch, Row
from microturn.model.parallel.followers import Followers
from support import models
from support.parallel_runner import parallel_runner

TOLD_WITHIN_S = 30

# The rank has been started, or waits for a command, or within one for this process's part.
PROGRAM = """
import sys
from microturn.model.parallel.commands import TellFree
from microturn.model.parallel.followers import Followers
if __name__ == "__main__":
    followers = Followers(2)
    state = sys.argv[1]
    if state == "idle":
        with followers.doing(TellFree()) as ranks:
            import torch
            ranks.gather(torch.tensor([0]))
    elif state == "within a command":
        followers.tell(TellFree())
        followers.ranks
    print(followers._processes[0].pid, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lost() -> SimpleQueue[None]:
    return SimpleQueue()


@pytest.fixture
def followers(lost: SimpleQueue[None]) -> Iterator[Followers]:
    followers = Followers(2, on_lost=lambda: lost.put(None))
    yield followers
    followers.close()


def test_a_lost_rank_is_told_and_passes_fail(followers: Followers, lost: SimpleQueue[None]) -> None:
    runner = parallel_runner(followers, models.grouped_heads(), num_pages=4)
    batch = Batch([Row([1, 2, 3], 0, [0])])
    assert runner.run(batch).shape == (1, models.VOCAB_SIZE)
    followers._processes[0].kill()
    lost.get(timeout=TOLD_WITHIN_S)
    with pytest.raises((RuntimeError, OSError)):
        runner.run(batch)
    lost.get(timeout=TOLD_WITHIN_S)


def test_what_fails_before_others_are_told_is_this_pass_s_alone(followers: Followers, lost: SimpleQueue[None]) -> None:
    runner = parallel_runner(followers, models.grouped_heads(), num_pages=4)
    with pytest.raises(AssertionError, match="a row lacks the page"):
        runner.run(Batch([Row(list(range(40)), 0, [0])]))
    assert runner.run(Batch([Row([1, 2, 3], 0, [0])])).shape == (1, models.VOCAB_SIZE)
    assert lost.empty()


def test_copies_of_no_pages_and_of_all_ranks_pages(followers: Followers, lost: SimpleQueue[None]) -> None:
    kv = parallel_runner(followers, models.grouped_heads(), num_pages=4).kv
    assert kv.read([]).num_pages == 0
    kv.write([], kv.new_image(0))
    given = kv.new_image(2)
    for number, part in enumerate(given.blocks[0]):
        part.copy_(torch.full_like(part, number + 1))
    assert len(given.blocks[0]) == 2 * len(kv.tensors)
    kv.write([3, 1], given)
    got = kv.read([1, 3, 1])
    for part, expected in zip(got.blocks[0], given.blocks[0], strict=True):
        assert torch.equal(part, expected[[1, 0, 1]])
    assert lost.empty()


def test_a_model_that_cannot_be_cut_is_refused_and_the_next_is_loaded(
    followers: Followers, lost: SimpleQueue[None]
) -> None:
    with pytest.raises(InvalidArgument, match="it has experts"):
        parallel_runner(followers, models.experts(), num_pages=4)
    runner = parallel_runner(followers, models.biases(), num_pages=4)
    assert runner.run(Batch([Row([1, 2, 3], 0, [0])])).shape == (1, models.VOCAB_SIZE)
    assert lost.empty()


@pytest.mark.parametrize(
    ("is_killed", "state"),
    [(True, "started"), (False, "started"), (True, "idle"), (False, "idle"), (True, "within a command")],
)
def test_a_rank_ends_with_the_process_that_leads(is_killed: bool, state: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        assert program.stdin is not None
        rank = psutil.Process(int(program.stdout.readline()))
        if is_killed:
            program.kill()
        else:
            program.stdin.close()
        assert program.wait(TOLD_WITHIN_S) == (-9 if is_killed else 0)
    deadline_s = time.monotonic() + TOLD_WITHIN_S
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "a rank has outlived the process that leads"
        time.sleep(0.05)
