"""Models of many architectures: each is served with the stock model's tokens, or refused with the reason.

What each comes to stands in docs/models.md, which `make models-page` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from microturn.errors import InvalidArgument
from microturn.kv.window import Window
from microturn.model import recurrent
from microturn.model.runner import ModelRunner
from microturn.sessions.environment import next_epoch
from microturn.sessions.inputs import EmbedInput
from microturn.snapshots.directory import SnapshotDirectory
from support.driver import Driver, Recorder
from support.families import FAMILIES, pristine, pristine_logits, write_family
from support.models_page import PAGE, load, page_of, row_of, rows_of
from support.plain_window import pristine_windowed_logits
from support.snapshots import RESUME, copied_kv, saved
from support.tiers import counters_of, move_all_out, scramble

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_GENERATED = 6
WINDOW = Window(num_sinks=16, length=24, slack=16)
WINDOWED = {"overflow": "window", "sink_tokens": WINDOW.num_sinks, "window_tokens": WINDOW.length}


class Talks:
    """Sessions of a model in one engine after another, compared with a model that nobody has touched.

    Args:
        model_dir: of the model.
        runner: of the same.
        snapshots: where sessions are on their way to the next engine.
    """

    def __init__(self, model_dir: Path, runner: ModelRunner, snapshots: Path) -> None:
        self._stock = pristine(model_dir)
        self._tolerance = 1e-3 if recurrent.installed(runner.model) is None else 5e-3
        self._runner = runner
        self._snapshots = snapshots
        self._generator = torch.Generator().manual_seed(5)
        self._contexts: dict[int, list[int]] = {}
        self.driver = self._new_driver()

    def turn(self, *sessions: int, num_given: int, window: Window | None = None, **options: Any) -> list[Recorder]:
        """A turn of each session, beside each other."""
        answers = []
        for session in sessions:
            size = (num_given + session,)
            given = torch.randint(1, self._runner.vocab_size, size, generator=self._generator).tolist()
            options["start"] = session not in self._contexts
            context = self._contexts.setdefault(session, [])
            context[options.get("rewind_to", len(context)) :] = given
            answers.append(
                self.driver.post(session, given, max_tokens=NUM_GENERATED, ignore_eos=True, logprobs=5, **options)[0]
            )
        self.driver.run()
        for session, answer in zip(sessions, answers, strict=True):
            context = self._contexts[session]
            context += answer.token_ids
            assert answer.status.context_len == len(context)
            self._check(context, answer, window)
        return answers

    def _check(self, context: list[int], answer: Recorder, window: Window | None) -> None:
        """Compares the likeliest tokens; their own does not say enough where a model hardly ever hesitates."""
        if window is None:
            logits = pristine_logits(self._stock, context)
        else:
            logits = pristine_windowed_logits(self._stock, context, window)
        self._compare(logits[-1 - NUM_GENERATED : -1], answer)

    def _compare(self, logits: Tensor, answer: Recorder) -> None:
        likeliest = [top for output in answer.outputs for top in output.top_logprobs]
        for row, top, token_id in zip(logits.log_softmax(-1), likeliest, answer.token_ids, strict=True):
            ids, logprobs = zip(*top, strict=True)
            assert token_id == ids[0]
            assert (row[list(ids)] - torch.tensor(logprobs)).abs().max() <= self._tolerance, "other tokens are likely"
            assert row.max() - row[token_id] <= self._tolerance

    def listen(self, session: int) -> None:
        """A turn with embeddings, which are of no tokens."""
        embeds = torch.randn(20, self._runner.hidden_size, generator=self._generator)
        answer = self.driver.turn(session, EmbedInput(embeds), start=True, max_tokens=1, ignore_eos=True, logprobs=5)
        if not self._runner.accepts_embeds:
            assert answer.code == "INVALID_ARGUMENT"
            return
        assert answer.status.context_len == 21
        with torch.inference_mode():
            self._compare(self._stock(inputs_embeds=embeds[None], use_cache=False).logits[0, -1:], answer)

    def move_to_another_engine(self) -> None:
        """Saves all sessions and their KV, and restores them."""
        before, directory = self.driver, self.driver.engine.snapshots
        assert directory is not None
        for session in self._contexts:
            snapshot = saved(before, session, epoch=next_epoch())
            directory.save(snapshot)
            assert directory.add_kv(snapshot, copied_kv(before, session))
        before.engine.stop()
        scramble(self._runner.kv, range(before.pool.num_pages))
        self.driver = self._new_driver()
        for session in self._contexts:
            self.driver.turn(session, **RESUME)

    def _new_driver(self) -> Driver:
        kv = self._runner.kv
        return Driver(
            self._runner,
            num_pages=kv.num_pages // (kv.groups.num_groups + bool(kv.states)),
            max_batch_tokens=64,
            window_slack=WINDOW.slack,
            host_tier_bytes=1 << 26,
            snapshots=SnapshotDirectory(self._snapshots, ttl_s=600),
        )


def check_sessions(model_dir: Path, runner: ModelRunner, snapshots: Path) -> None:
    """Sessions go through all that a server does with them."""
    talks = Talks(model_dir, runner, snapshots)
    for num_given in (20, 31):
        talks.turn(1, 2, num_given=num_given)
    talks.turn(1, num_given=5, rewind_to=50)

    move_all_out(talks.driver)
    assert talks.driver.pool.num_free == talks.driver.pool.num_pages
    scramble(runner.kv, range(talks.driver.pool.num_pages))
    restored = talks.turn(1, 2, num_given=7)
    assert counters_of(talks.driver).restored == 2
    talks.move_to_another_engine()
    for number, answer in enumerate([*restored, *talks.turn(1, 2, num_given=7)]):
        # What was generated last is computed with the next turn.
        assert answer.status.usage["computed_tokens"] == 7 + number % 2 + 1 + NUM_GENERATED

    talks.listen(3)
    if runner.no_window_reason is None:
        for num_given in (40, 30, 30):
            talks.turn(4, num_given=num_given, window=WINDOW, **(WINDOWED if num_given == 40 else {}))
    else:
        refused = talks.driver.turn(4, [5], start=True, **WINDOWED)
        assert refused.code == "INVALID_ARGUMENT"
        assert runner.no_window_reason in str(refused.error)
    talks.driver.engine.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_served_with_the_stock_models_tokens_or_refused_in_words(family: str, tmp_path: Path) -> None:
    """Cohere's models were served with wrong tokens: the check compared with the model as we had changed it.

    Others ended the start with a bare TypeError or RuntimeError, or were refused with `'microturn_paged'`.
    """
    directory = write_family(family, tmp_path / family)
    loaded = load(directory)
    written = rows_of(PAGE.read_text()).get(family)
    assert row_of(family, directory, loaded) == written, "docs/models.md is out of date: run `make models-page`"
    if not isinstance(loaded, InvalidArgument):
        check_sessions(directory, loaded, tmp_path / "snapshots")


def test_the_page_has_each_family_once() -> None:
    page = PAGE.read_text()
    rows = rows_of(page)
    assert (list(rows), page) == (list(FAMILIES), page_of(rows)), (
        "docs/models.md is out of date: run `make models-page`"
    )
