"""Layers with a window of their own give up what they see no more, and no token or logit changes.

Oracles 1 to 5 again, for sessions many times as long as the layers' window, which come, go back, fork and give way all
at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from microturn.kv.page_layout import PageLayout
from microturn.kv.page_track import Track
from microturn.kv.tensors import KVTensors
from microturn.model.cpu.attention import NativePlan
from microturn.model.runner import ModelRunner
from microturn.model.tracing import trace_layers
from support import models
from support.driver import Driver, Recorder, model_runner
from support.models import VOCAB_SIZE
from support.oracle import RecordingDriver, check_greedy, check_sampled, stock_logits
from support.tiers import counters_of

PAGE_SIZE = 16
SLACK = 16


@dataclass
class Talk:
    """A session's tokens, and the logits that those were sampled from which it generated."""

    tokens: list[int] = field(default_factory=list)
    generated: dict[int, torch.Tensor] = field(default_factory=dict)

    def left_of(self, length: int) -> Talk:
        """What a cut leaves."""
        return Talk(self.tokens[:length], {at: logits for at, logits in self.generated.items() if at < length})


class Family:
    """Sessions that begin alike, fork, and go on in each other's company, and what each of them must be."""

    def __init__(self, runner: ModelRunner, seed: int, num_pages: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.driver = RecordingDriver(
            runner,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_context=600,
            max_batch_tokens=40,
            window_slack=SLACK,
            **settings,
        )
        self.talks: dict[int, Talk] = {}
        self.num_computed = 0
        self._answers: dict[int, Recorder] = {}

    def say(self, session: int, talk: Talk, given: Sequence[int] = (), **asked: Any) -> None:
        """A turn behind what the session is to be, after which the engine makes some steps."""
        given = [*given, *self.rng.choices(range(VOCAB_SIZE), k=self.rng.randint(1, 30))]
        self.talks[session] = talk
        talk.tokens += given
        max_tokens = self.rng.choice([0, 2, 5, 25])
        self._answers[session], _ = self.driver.post(session, given, max_tokens=max_tokens, ignore_eos=True, **asked)
        self.driver.steps(self.rng.randint(0, 2))

    def listen(self) -> None:
        """All turns end, and their answers stand in the sessions."""
        self.driver.run()
        for session, answer in self._answers.items():
            talk = self.talks[session]
            for token_id in answer.token_ids:
                talk.generated[len(talk.tokens)] = self.driver.logits[session, len(talk.tokens)]
                talk.tokens.append(token_id)
            assert answer.status.context_len == len(talk.tokens)
            self.num_computed += answer.status.usage["computed_tokens"]
        self._answers.clear()

    def length_to_go_back_to(self, talk: Talk) -> int:
        """The end, a little before it, or anywhere."""
        length = len(talk.tokens)
        return max(1, length - self.rng.choice([0, 3, SLACK, 40, self.rng.randint(0, length)]))


def check_layer_windows(
    model: PreTrainedModel, *, seed: int, num_pages: int = 400, layout: PageLayout = PageLayout.PANELS, **settings: Any
) -> Family:
    """Three sessions begin, most often alike, and three are forked off; each has many turns, and goes back at times.

    Raises:
        AssertionError: when a logit differs from that of one forward pass of the stock model, or a greedy token is
            another one.
    """
    runner = model_runner(model, num_pages=num_pages, page_size=PAGE_SIZE, layout=layout)
    family = Family(runner, seed, num_pages, **settings)
    rng = family.rng
    common = rng.choices(range(VOCAB_SIZE), k=70)
    for number in range(12):
        old = [*family.talks]
        if number < 3:
            family.say(number, Talk(), common[: rng.choice([40, 70])], start=True)
        elif number < 6:
            parent = rng.choice(old)
            left = family.length_to_go_back_to(family.talks[parent])
            family.say(number, family.talks[parent].left_of(left), start=True, fork_of=str(parent), rewind_to=left)
        for session in rng.sample(old, len(old)):
            talk, asked = family.talks[session], {}
            if rng.random() < 0.35:
                asked["rewind_to"] = family.length_to_go_back_to(talk)
                talk = talk.left_of(asked["rewind_to"])
            family.say(session, talk, **asked)
        family.listen()
    for talk in family.talks.values():
        check_sampled(stock_logits(model, talk.tokens), talk.tokens, talk.generated)
    assert sum(len(talk.generated) for talk in family.talks.values()) >= 80, "the run compared too little"
    assert max(len(talk.tokens) for talk in family.talks.values()) > 150, "the windows slid too little"
    return family


@pytest.fixture(scope="module")
def roomy() -> Family:
    """Sessions of which none has to give way, and none shares a prefix."""
    return check_layer_windows(models.sliding_window(), seed=1, share_prefixes=False)


def test_long_sessions_say_what_the_stock_model_says(roomy: Family) -> None:
    lengths = [len(talk.tokens) for talk in roomy.talks.values()]
    assert sorted(lengths)[2] > 100, "the windows slid too little"


def test_with_torchs_attention_they_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativePlan, "__init__", lambda *_: pytest.fail("this is not torch's"))
    check_layer_windows(models.sliding_window(), seed=2, layout=PageLayout.HND)


def test_so_they_do_where_no_layer_sees_all() -> None:
    check_layer_windows(models.only_sliding(), seed=3, share_prefixes=True)


def test_what_is_preempted_is_computed_again_as_it_was(roomy: Family) -> None:
    tight = check_layer_windows(models.sliding_window(), seed=1, num_pages=38)
    assert tight.num_computed > 1.2 * roomy.num_computed, "nothing was preempted"


def test_what_was_moved_out_comes_back_as_it_was(tmp_path: Path) -> None:
    tiers = {"host_tier_bytes": 60_000, "disk_tier_dir": str(tmp_path)}
    family = check_layer_windows(models.sliding_window(), seed=4, num_pages=25, share_prefixes=True, **tiers)
    family.driver.engine.stop()
    counters = counters_of(family.driver)
    assert min(counters.restored, counters.read_from_disk) > 5


def test_prefixes_are_shared_as_far_as_what_is_seen_of_them_is_there(roomy: Family) -> None:
    shared = check_layer_windows(models.sliding_window(), seed=1, share_prefixes=True)
    assert shared.num_computed <= roomy.num_computed - 2 * 40


@pytest.mark.parametrize(("num_more", "seed"), [(1, 6), (PAGE_SIZE, 1)])
def test_the_oracle_sees_tokens_that_are_given_up_too_early(
    monkeypatch: pytest.MonkeyPatch, num_more: int, seed: int
) -> None:
    """A planted mistake, in what is given up and in what is said of it.

    That of one token shows where a page ends just there, in a run in which a session goes back to such a place.
    """
    num_unseen, reaches = Track.num_unseen, Track.reaches

    def too_many(self: Track, kv_len: int, page_size: int) -> int:
        return num_unseen(self, kv_len + num_more if self.window else kv_len, page_size)

    monkeypatch.setattr(Track, "num_unseen", too_many)
    monkeypatch.setattr(Track, "reaches", lambda self, kv_len: reaches(self, kv_len + num_more if kv_len else 0))
    with pytest.raises(AssertionError, match="the logits of token"):
        check_layer_windows(models.sliding_window(), seed=seed)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_a_long_session_falls_as_its_layers_see_less() -> None:
    """One layer sees all and two see 20 tokens: at 600 tokens these keep a tenth, the session two fifths."""
    model = models.sliding_window()
    layers = trace_layers(model)
    alone = ModelRunner(model, KVTensors(layers, 40, PAGE_SIZE, layout=PageLayout.PANELS))
    used_bytes = []
    for runner in (alone, model_runner(model, num_pages=40, page_size=PAGE_SIZE)):
        driver = Driver(runner, num_pages=40, page_size=PAGE_SIZE, max_context=640, window_slack=SLACK)
        rng = random.Random(5)
        for number in range(30):
            driver.turn(1, rng.choices(range(VOCAB_SIZE), k=15), start=number == 0, max_tokens=5, ignore_eos=True)
        used_bytes.append((driver.pool.num_pages - driver.pool.num_free) * runner.kv.bytes_per_page)
    assert used_bytes[0] == 38 * PAGE_SIZE * KVTensors.bytes_per_token(layers)
    # 20 tokens that are seen, 16 of slack, the last answer and what a page has more, in whole pages of two groups.
    num_pages = -(-(20 + SLACK + 5 + PAGE_SIZE - 1) // PAGE_SIZE)
    page_bytes = PAGE_SIZE * KVTensors.bytes_per_token(layers[:1])
    assert used_bytes[1] <= (38 + 2 * num_pages) * page_bytes < 0.41 * used_bytes[0]


def test_a_cut_into_the_last_answer_costs_nothing_however_long_that_was() -> None:
    """And one further back than that computes all again, and says the same."""
    model = models.sliding_window()
    # A session that begins with another's pages has of layers with a window the last ones alone.
    runner = model_runner(model, page_size=PAGE_SIZE)
    driver = Driver(runner, page_size=PAGE_SIZE, window_slack=SLACK, share_prefixes=False)
    prompt = [(7 * at) % VOCAB_SIZE for at in range(90)]
    for session, (left, num_cached) in enumerate([(139, 138), (91, 90), (90 - SLACK, 89 - SLACK), (60, 0)]):
        whole = [*prompt, *driver.turn(session, prompt, start=True, max_tokens=50, ignore_eos=True).token_ids]
        again = driver.turn(session, max_tokens=len(whole) - left, rewind_to=left, ignore_eos=True)
        assert len(again.token_ids) == len(whole) - left
        check_greedy(model, [*whole[:left], *again.token_ids], range(left, len(whole)))
        assert again.status.usage["cached_tokens"] == num_cached
