"""The real server and a client that does not read: what it is owed must not fill the server's memory."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.raw import RawStream, ids, turn_request
from support.scrape import scrape_until
from support.served import Served, Start

_TURNS = "microturn_turns_total"
# In how many Triton would take more than may be: 44 MB, or 84 MB with --full.
_NUM_KEEPALIVES, _NUM_KEEPALIVES_FULL = 6_000, 12_000
# Keep-alives that come faster than they are done wait in Triton's queue, and that is another matter.
_RATE_PER_S = 700
_MAX_GROWTH_BYTES = 30_000_000
# So that what is not read stays with the server, not in this process.
_SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)


def test_unread_keepalives_do_not_fill_the_servers_memory(start_tiny: Start, full: bool) -> None:
    """Each answer that a client did not read took 7 KB of Triton's memory and never gave it back, not even when the
    client had left: 20,000 keep-alives were 146 MB of it."""
    num_keepalives = _NUM_KEEPALIVES_FULL if full else _NUM_KEEPALIVES
    server = start_tiny()
    server.wait_until_ready()
    (triton,) = [process for process in server.tree() if process.name() == "tritonserver"]
    with RawStream(server.address) as bystander:
        bystander.ask("bystander", start=True, options={"max_tokens": 0}, input_ids=ids(5))
        before = triton.memory_info().rss
        with _unread_keepalives(server, "flood", num_keepalives):
            scrape_until(server.metrics_url, lambda page: page.sum(_TURNS, finish_reason="append") >= num_keepalives)
            assert bystander.ask("bystander", options={"max_tokens": 2}, input_ids=ids(6)).error is None
            growth = triton.memory_info().rss - before
            # The session that was flooded goes on, for who reads.
            assert bystander.ask("flood", options={"max_tokens": 2}, input_ids=ids(6)).token_ids
        answer = bystander.ask("bystander", end=True, input_ids=ids())
    assert answer.status is not None
    assert growth < _MAX_GROWTH_BYTES


@contextlib.contextmanager
def _unread_keepalives(server: Served, session_id: str, number: int) -> Iterator[None]:
    """A stream on which so many keep-alives are sent, and only the answer to START is read."""
    is_over = threading.Event()

    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        yield turn_request(session_id, start=True, options={"max_tokens": 0}, input_ids=ids(5))
        keep_alive = turn_request(session_id, input_ids=ids())
        for _ in range(number):
            keep_alive.id = secrets.token_hex(4)
            yield keep_alive
            time.sleep(1 / _RATE_PER_S)
        is_over.wait(120)

    with grpc.insecure_channel(server.address, options=_SMALL_WINDOW) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        next(call)
        try:
            yield
        finally:
            is_over.set()
            call.cancel()
