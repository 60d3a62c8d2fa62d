"""Oracle 7, for KV that moves while its session goes on: with it the session computes nothing again, and goes on to the
bit as it would have gone on undisturbed.

The KV goes to another server ahead of its session, or into files every so often; the pages that have come since follow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.admin import hand_over
from microturn.admin.peer_connection import PeerConnection
from microturn.admin.saver import Saver
from microturn.snapshots.directory import SnapshotDirectory
from support import models
from support.driver import model_runner
from support.fleet_servers import StartServers, starting_servers
from support.models import VOCAB_SIZE
from support.snapshots import RESUME
from support.threads import Threaded, starting_engines

PAGE_SIZE, NUM_PAGES = 16, 256
# Models whose pages are of several kinds, or written again.
NAMES = ["grouped_heads", "sliding_window", "only_sliding", "recurrent", "mamba2_hybrid", "int8"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made: PreTrainedModel = getattr(models, request.param)()
    return made


def driver_of(model: PreTrainedModel, **kwargs: Any) -> Threaded:
    runner = model_runner(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    settings = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_context": 2048, "window_slack": 32, **kwargs}
    return Threaded(runner, clock=time.monotonic, **settings)


class Talk:
    """A session that says the same things here and there, undisturbed and moved."""

    def __init__(self, undisturbed: Threaded, seed: int) -> None:
        self._undisturbed = undisturbed
        self._chance = random.Random(seed)
        self._is_new = True

    def say(self, driver: Threaded, length: int, *, cut: int = 0, **values: Any) -> None:
        """A turn, whose answer and, where it is the first elsewhere, work must be those of the undisturbed session."""
        given = self._chance.choices(range(VOCAB_SIZE), k=length)
        options = {"max_tokens": 5, **SAMPLED, **({"rewind_to": cut} if cut else {})}
        opening = {"start": True, "seed": 3} if self._is_new else {}
        expected = self._undisturbed.ask(1, given, **options, **opening).wait()
        answer = driver.ask(1, given, **options, **(opening or values)).wait()
        self._is_new = False
        assert answer.token_ids == expected.token_ids
        if values:  # elsewhere; here a cut into pages that are being copied computes some of one again
            assert answer.status.usage["computed_tokens"] == expected.status.usage["computed_tokens"]


@pytest.fixture
def start_servers(model: PreTrainedModel) -> Iterator[StartServers]:
    with starting_servers(partial(driver_of, model)) as start:
        yield start


def test_a_session_that_is_handed_over(start_servers: StartServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_AHEAD_BYTES", 0)
    undisturbed, here, there = start_servers(3, num_pages=NUM_PAGES, max_context=2048)
    talk = Talk(undisturbed.driver, 1)
    talk.say(here.driver, 200)
    send_ahead = PeerConnection.send_ahead
    meanwhile: list[Any] = []

    def then_go_on(self: PeerConnection, kv: Any) -> str:
        transfer = send_ahead(self, kv)
        meanwhile.pop()()
        return transfer

    monkeypatch.setattr(PeerConnection, "send_ahead", then_go_on)
    steps = [
        lambda driver: talk.say(driver, 3),
        lambda driver: talk.say(driver, 90),
        lambda driver: talk.say(driver, 20, cut=230),
        lambda _: None,
    ]
    for step in steps:
        meanwhile.append(partial(step, here.driver))
        here.do("move", id="1", to=there.address)
        talk.say(there.driver, 7, **RESUME)
        here, there = there, here


def test_a_session_that_is_saved_while_it_goes_on(model: PreTrainedModel, tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    with starting_engines(partial(driver_of, model)) as start:
        talk = Talk(start(), 2)
        driver = start(snapshots=directory)
        values: dict[str, Any] = {}
        for _ in range(3):  # each goes on where the one before died
            with closing(Saver(driver.engine, directory, 1e6)) as saver:
                talk.say(driver, 150, **values)
                saver._save_all()
                for length, cut in ((3, 0), (60, 0), (10, 130), (40, 0)):
                    talk.say(driver, length, cut=cut)
                    saver._save_all()
            driver, values = start(snapshots=directory), RESUME
        talk.say(driver, 9, **RESUME)
