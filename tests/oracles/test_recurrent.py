"""Recurrent layers: any history of cuts, forks, preemption and restored sessions equals one pass of the stock model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from microturn.kv.state_pages import StatePages
from microturn.kv.state_track import StateTrack
from microturn.model.recurrent import RecurrentLayers
from microturn.sessions.environment import next_epoch
from microturn.snapshots.directory import SnapshotDirectory
from support import models
from support.driver import Driver, Recorder, model_runner
from support.models import VOCAB_SIZE
from support.oracle import check_greedy
from support.snapshots import RESUME, copied_kv, find, saved
from support.tiers import move_all_out

FAMILIES = ["recurrent", "mamba2_hybrid", "short_convolutions", "attention_beside_mamba2"]
NUM_PAGES = 60
BLOCK = 64


def new_driver(model: PreTrainedModel, snapshots: Path | None = None, **settings: Any) -> Driver:
    return Driver(
        model_runner(model, num_pages=NUM_PAGES),
        num_pages=NUM_PAGES,
        max_context=600,
        max_batch_tokens=100,
        snapshots=None if snapshots is None else SnapshotDirectory(snapshots, ttl_s=600),
        host_tier_bytes=1 << 26,
        **settings,
    )


class Histories:
    """Sessions of one engine to which anything happens, and what each has been told and has said.

    Args:
        model: the stock model.
        seed: of all that happens.
        directory: for snapshots.
    """

    def __init__(self, model: PreTrainedModel, seed: int, directory: Path) -> None:
        self._model = model
        self._rng = random.Random(seed)
        self._directory = directory
        self._driver = new_driver(model, directory)
        self._tokens: dict[str, list[int]] = {}
        self.num_checked = 0

    def go_on(self, num_events: int) -> None:
        """Lets some things happen; whatever is generated is compared with the stock model."""
        for _ in range(num_events):
            events = [self._turns, self._turns, self._cut, self._interrupt, self._fork, self._move, self._restore]
            self._rng.choice(events)()
            self._driver.engine.check_integrity()
        self._driver.engine.stop()

    def _post(self, name: str, **options: Any) -> Recorder:
        given = self._rng.choices(range(VOCAB_SIZE), k=self._rng.choice([1, 5, 20, 63, 64, 65, 130]))
        # The context is cut when the turn begins.
        tokens = self._tokens.setdefault(name, [])
        del tokens[options.get("rewind_to", len(tokens)) :]
        tokens += given
        return self._driver.post(name, given, max_tokens=self._rng.choice([0, 1, 8, 30]), ignore_eos=True, **options)[0]

    def _heard(self, name: str, answer: Recorder) -> None:
        tokens = self._tokens[name]
        generated = range(len(tokens), len(tokens) + len(answer.token_ids))
        tokens += answer.token_ids
        check_greedy(self._model, tokens, generated)
        self.num_checked += len(generated)
        assert answer.status.context_len == len(tokens)

    def _room(self) -> list[str]:
        return [name for name, tokens in self._tokens.items() if len(tokens) < 400]

    def _turns(self) -> None:
        """Several sessions at once, a new one among them."""
        names = self._rng.sample(self._room(), min(len(self._room()), 3))
        answers = {name: self._post(name) for name in names}
        if len(self._tokens) < 6:
            name = f"session {len(self._tokens)}"
            answers[name] = self._post(name, start=True)
        self._driver.run()
        for name, answer in answers.items():
            self._heard(name, answer)

    def _cut(self) -> None:
        for name in self._room():
            answer = self._post(name, rewind_to=self._rng.randint(0, len(self._tokens[name])))
            self._driver.run()
            self._heard(name, answer)

    def _interrupt(self) -> None:
        """A turn is cut while it runs; where it was, only the engine knows."""
        for name in self._room()[:2]:
            before = len(self._tokens[name])
            first = self._post(name)
            for _ in range(self._rng.randint(0, 6)):
                self._driver.engine.step()
            given = self._tokens[name][before:]
            del self._tokens[name][before:]
            second = self._post(name, rewind_to=before, on_overlap="interrupt")
            self._driver.run()
            assert first.is_done
            assert given
            self._heard(name, second)

    def _fork(self) -> None:
        if not self._tokens or len(self._tokens) > 6:
            return
        parent, child = self._rng.choice(list(self._tokens)), f"branch {len(self._tokens)}"
        self._tokens[child] = [*self._tokens[parent]]
        answer = self._post(child, start=True, fork_of=parent)
        self._driver.run()
        self._heard(child, answer)

    def _move(self) -> None:
        """All parked sessions leave the pool, for host memory or, where that is full, for good."""
        move_all_out(self._driver)

    def _restore(self) -> None:
        """All sessions go on in another engine, some of them without their KV."""
        after = new_driver(self._model, self._directory)
        for name, tokens in self._tokens.items():
            if not tokens:
                continue
            snapshot = saved(self._driver, name, epoch=next_epoch())
            directory = self._driver.engine.snapshots
            assert directory is not None
            directory.save(snapshot)
            if self._rng.random() < 0.7 and find(self._driver, name).kv_len:
                directory.add_kv(snapshot, copied_kv(self._driver, name))
        self._driver.engine.stop()
        self._driver = after
        for name in self._tokens:
            after.turn(name, **RESUME)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_histories_equal_the_stock_model(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = getattr(models, family)()
    num_checked = 0
    for seed in range(request.config.getoption("--histories")):
        histories = Histories(model, seed, tmp_path / str(seed))
        histories.go_on(12)
        num_checked += histories.num_checked
    assert num_checked > 50


def test_a_cut_of_twenty_tokens_behind_four_thousand_computes_at_most_a_block() -> None:
    model = models.recurrent()
    driver = Driver(model_runner(model, num_pages=400), num_pages=400, max_context=4096, max_batch_tokens=512)
    rng = random.Random(0)
    tokens = rng.choices(range(VOCAB_SIZE), k=4000)
    tokens += driver.turn(1, tokens, start=True, max_tokens=30, ignore_eos=True).token_ids
    for num_back in (20, 1, 64, 33):
        del tokens[-num_back:]
        answer = driver.turn(1, [5], rewind_to=len(tokens), max_tokens=8, ignore_eos=True)
        assert answer.status.usage["computed_tokens"] <= BLOCK + 1 + 8
        tokens += [5, *answer.token_ids]
        check_greedy(model, tokens, range(len(tokens) - 8, len(tokens)))
    # Further back fewer states are kept: about half as many tokens are computed as the cut is long.
    del tokens[2000:]
    answer = driver.turn(1, [5], rewind_to=len(tokens), max_tokens=8, ignore_eos=True)
    assert answer.status.usage["computed_tokens"] <= 4000 // 4 + BLOCK


def test_states_take_a_tenth_of_the_memory_of_a_long_session() -> None:
    driver = Driver(model_runner(models.recurrent(), num_pages=800), num_pages=800, max_context=8192)
    driver.turn(1, [at % VOCAB_SIZE for at in range(8000)], start=True, max_tokens=4)
    table = find(driver, 1).table
    num_keys, num_states = (len(ids) for ids in table.page_ids)
    assert num_states - table.tracks[-1].num_groups <= 0.1 * num_keys


def test_a_turn_behind_a_turn_computes_no_token_twice() -> None:
    driver = new_driver(models.recurrent())
    for number in range(8):
        answer = driver.turn(1, [7] * 9, start=number == 0, max_tokens=6, ignore_eos=True)
        # The last token of a turn is computed with the next one.
        assert answer.status.usage["computed_tokens"] == 9 + 6 - (number == 0)


def test_what_begins_alike_shares_states() -> None:
    driver = new_driver(models.recurrent(), share_prefixes=True)
    prompt = [at % VOCAB_SIZE for at in range(200)]
    first = driver.turn(1, prompt, start=True, max_tokens=6, cache_salt="ours")
    second = driver.turn(2, prompt, start=True, max_tokens=6, cache_salt="ours")
    assert second.token_ids == first.token_ids
    assert second.status.usage["cached_tokens"] == 192


def test_a_copy_that_is_made_while_the_session_goes_on_is_of_its_beginning(tmp_path: Path) -> None:
    """The newest state is written again with each step: the copy has it as it was."""
    driver = new_driver(models.recurrent(), tmp_path / "1")
    driver.turn(1, [3] * 100, start=True, max_tokens=2, ignore_eos=True)
    snapshot, session = saved(driver, 1, epoch=next_epoch()), find(driver, 1)
    copying = driver.engine.copies.begin(session)
    assert copying is not None
    expected = driver.turn(1, [4], max_tokens=9, ignore_eos=True)
    while not driver.engine.copies.advance(copying):
        pass
    driver.engine.copies.end(copying)
    directory = driver.engine.snapshots
    assert directory is not None
    directory.save(snapshot)
    assert directory.add_kv(snapshot, driver.engine.copies.finish(copying))
    after = new_driver(models.recurrent(), tmp_path / "1")
    after.turn(1, **RESUME)
    again = after.turn(1, [4], max_tokens=9, ignore_eos=True)
    assert again.token_ids == expected.token_ids
    assert again.status.usage == expected.status.usage


def test_a_pass_that_fails_leaves_the_state_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokens' states are written already: what fails is the choice behind them."""
    model = models.recurrent()
    driver = new_driver(model)
    tokens = [3] * 100
    tokens += driver.turn(1, tokens, start=True, max_tokens=3, ignore_eos=True).token_ids
    with monkeypatch.context() as patch:
        patch.setattr("microturn.engine.steps.draw", lambda *_: 1 / 0)
        assert driver.turn(1, [4] * 70, max_tokens=3).code == "INTERNAL"
    tokens += [4, *driver.turn(1, [4], max_tokens=6, ignore_eos=True).token_ids]
    assert len(tokens) == 110
    check_greedy(model, tokens, range(104, 110))


# ---- the oracle itself -----------------------------------------------------------------------------------------------


def cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: states are taken for those of any position."""
    monkeypatch.setattr(StateTrack, "reaches", lambda *_: True)


def test_a_state_of_another_position_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_anywhere(monkeypatch)
    driver = new_driver(models.recurrent())
    driver.turn(1, [3] * 100, start=True, max_tokens=2)
    answer = driver.turn(1, [4], rewind_to=90, max_tokens=2)
    assert answer.code == "INTERNAL"
    assert "of positions [101] are in the pages of those of [89]" in str(answer.error)


@pytest.mark.parametrize("mistake", ["cut anywhere", "not carried", "of others"])
def test_the_oracle_sees_planted_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mistake: str) -> None:
    monkeypatch.setattr(RecurrentLayers, "_check", lambda *_: None)
    if mistake == "cut anywhere":
        cut_anywhere(monkeypatch)
    elif mistake == "not carried":
        monkeypatch.setattr(RecurrentLayers, "carry", lambda *_: None)
    else:
        read = StatePages.read
        monkeypatch.setattr(StatePages, "read", lambda self, pages: read(self, (pages + 2) % NUM_PAGES))
    with pytest.raises(AssertionError):
        Histories(models.recurrent(), 1, tmp_path).go_on(30)
