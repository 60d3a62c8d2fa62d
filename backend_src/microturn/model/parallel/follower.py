"""The process of a rank behind rank 0: it does what rank 0 tells it, until rank 0 has gone.

    python -m microturn.model.parallel.follower CONNECTION PLACE RANK SIZE BINDS

The first two are file descriptors: of the socket to rank 0, and of a file that the ranks find each other by. BINDS is 1
where the rank runs on its share of the CPUs. What fails here fails at rank 0 too, which waits for this rank's part:
nothing is caught.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from microturn.model import runner
from microturn.model.cpu import stored_model, weight_memory
from microturn.model.parallel import cpus
from microturn.model.parallel.commands import Allocate, Command, Load, Pass, ReadPages, WritePages
from microturn.model.parallel.copier import receive_pages, send_pages
from microturn.model.parallel.ranks import Ranks, place_of
from microturn.model.parallel.share import FollowingRunner, Share


def follow(leader: Connection, meet: Callable[[], Ranks]) -> None:
    """Does what rank 0 tells, until it has gone.

    Args:
        leader: to rank 0.
        meet: waits for all ranks.
    """
    ranks: Ranks | None = None
    share: Share | None = None
    model_runner: FollowingRunner | None = None
    while True:
        try:
            command: Command = leader.recv()
        except EOFError:
            return
        ranks = ranks or meet()
        match command:
            case Load():
                share = model_runner = None  # their memory first
                share = _load(command, ranks)
                leader.send(None)
                continue
            case Allocate():
                assert share is not None, "a share is loaded first"
                model_runner = None
                model_runner = FollowingRunner(share, command)
                continue
        assert model_runner is not None, "pages are allocated first"
        match command:
            case Pass(batch):
                model_runner.run(batch)
            case ReadPages(pages):
                send_pages(model_runner.kv.tensors, pages, ranks)
            case WritePages(pages):
                receive_pages(model_runner.kv.tensors, pages, ranks)


def _load(load: Load, ranks: Ranks) -> Share:
    runner.set_num_threads(load.num_threads)
    with weight_memory.returned_at_once():
        model = stored_model.read_model(load.model_dir)
        return Share.of(model, runner.trace_layers(model), load.weights, ranks)


def main(connection: int, place: int, rank: int, size: int, binds: int) -> None:
    """Runs the process; see above."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all processes at once
    if binds:
        cpus.take_share(rank, size)
    follow(Connection(connection), lambda: Ranks(place_of(place), rank, size))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
