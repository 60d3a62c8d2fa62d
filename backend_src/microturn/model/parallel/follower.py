"""The process of a rank behind rank 0: it does what rank 0 tells it, until rank 0 has gone.

    python -m microturn.model.parallel.follower CONNECTION LIFELINE PLACE RANK SIZE DEVICE BINDS

The first three are file descriptors: of the socket to rank 0, of a pipe that ends when rank 0 has, and of a file that
the ranks find each other by. DEVICE is cpu or cuda, and BINDS 1 where the rank runs on its share of the CPUs. What
fails here fails at rank 0 too, which waits for this rank's part: nothing is caught.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread

# Importing takes half of the time so. Rank 0's process does the same.
gc.disable()

from microturn.model.lean_imports import import_transformers

import_transformers()

import torch
from transformers.utils.logging import disable_progress_bar

from microturn.model import runner
from microturn.model.parallel import cpus
from microturn.model.parallel.commands import Allocate, Capture, Command, Load, Pass, ReadPages, TellFree, WritePages
from microturn.model.parallel.copier import receive_pages, send_pages
from microturn.model.parallel.ranks import Ranks, place_of
from microturn.model.parallel.runners import FollowingRunner, following_runner
from microturn.model.parallel.share import Share
from microturn.model.traits import Traits

gc.freeze()
gc.enable()


def follow(leader: Connection, meet: Callable[[], Ranks]) -> None:
    """Does what rank 0 tells, until it has gone.

    Args:
        leader: to rank 0.
        meet: waits for all ranks.
    """
    leader.send_bytes(b"here")
    ranks: Ranks | None = None
    share: Share | None = None
    model_runner: FollowingRunner | None = None
    while True:
        try:
            command: Command = pickle.loads(leader.recv_bytes())
        except EOFError:
            return
        ranks = ranks or meet()
        match command:
            case Load():
                share = model_runner = None  # their memory first
                share = _load(command, ranks)
                leader.send_bytes(str(share.weight_bytes).encode())
                continue
            case Allocate():
                assert share is not None, "a share is loaded first"
                model_runner = None
                _free_memory(ranks)
                model_runner = following_runner(share, command)
                continue
            case TellFree():
                model_runner = None
                ranks.gather(torch.tensor([_free_memory(ranks)], device=ranks.device))
                continue
        assert model_runner is not None, "pages are allocated first"
        match command:
            case Capture():
                _capture(model_runner, command)
            case Pass():
                model_runner.follow(command)
            case ReadPages(pages):
                send_pages(model_runner.kv.tensors, pages, ranks)
            case WritePages(pages):
                receive_pages(model_runner.kv.tensors, pages, ranks)


def _load(load: Load, ranks: Ranks) -> Share:
    if load.for_gpu:
        from microturn.model.gpu.loading import DTYPES  # what only a GPU needs

        return Share.of(runner.load_model(load.model_dir, DTYPES[load.weights]), load, ranks)
    from microturn.model.cpu import stored_model, weight_memory  # what only a CPU needs: Numba

    runner.set_num_threads(load.num_threads)
    # Its own rotary module stays until that of rank 0 takes its place.
    known = Traits(dict(enumerate(load.shapes)), rotary=None)
    with weight_memory.returned_at_once():
        return Share.of(stored_model.read_model(load.model_dir, known), load, ranks)


def _capture(model_runner: FollowingRunner, capture: Capture) -> None:
    from microturn.model.parallel.gpu_runners import FollowingGpuRunner  # what only a GPU needs

    assert isinstance(model_runner, FollowingGpuRunner)
    model_runner.capture(capture.sizes, capture.max_context)


def _free_memory(ranks: Ranks) -> int:
    """Gives back what torch has cached on a GPU; bytes that are free there then."""
    if ranks.device.type == "cpu":
        return 0
    from microturn.model.gpu.serving import free_bytes  # what only a GPU needs

    return free_bytes(ranks.device)


def _end_with(lifeline: int) -> None:
    """Ends this process, in the middle of whatever it does, when rank 0 has ended."""
    os.read(lifeline, 1)
    os._exit(0)


def main(connection: str, lifeline: str, place: str, rank: str, size: str, device: str, binds: str) -> None:
    """Runs the process; see above."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all processes at once
    Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
    logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING)
    disable_progress_bar()
    if int(binds):
        cpus.take_share(int(rank), int(size))
    follow(Connection(int(connection)), lambda: Ranks(place_of(int(place)), int(rank), int(size), device))
    os._exit(0)  # at once: what torch's group would do at its end needs rank 0


if __name__ == "__main__":
    main(*sys.argv[1:])
