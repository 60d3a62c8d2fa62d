"""The oracles are tested themselves: a mask, a position or a page planted wrong must turn them red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from microturn.engine.in_flight_step import InFlightStep
from microturn.errors import InternalError
from microturn.model import runner
from microturn.model.batch import Batch
from microturn.model.paged_attention import PagedAttention
from microturn.model.paged_step import PagedStep
from microturn.model.runner import ModelRunner
from support.driver import asynchronous_runner
from support.models import VOCAB_SIZE
from support.oracle import check_incremental
from support.paths import PATHS

Plant = Callable[[pytest.MonkeyPatch], None]


def _position_off_by_one_in_later_turns(patch: pytest.MonkeyPatch) -> None:
    original = runner.positions_of

    def positions_of(batch: Batch) -> torch.Tensor:
        shift = torch.cat([torch.full((len(row.token_ids),), int(row.position > 0)) for row in batch.rows])
        return original(batch) + shift

    patch.setattr(runner, "positions_of", positions_of)


def _two_pages_swapped_when_read(patch: pytest.MonkeyPatch) -> None:
    def change(step: PagedStep) -> PagedStep:
        page_ids = step.page_ids.copy()
        if step.page_indptr[1] >= 2:
            page_ids[[0, 1]] = page_ids[[1, 0]]
        return replace(step, page_ids=page_ids)

    _change_plan(patch, change)


def _key_written_beside_its_slot(patch: pytest.MonkeyPatch) -> None:
    def change(step: PagedStep) -> PagedStep:
        slots = step.slots.copy()
        slots[0] ^= 1
        return replace(step, slots=slots)

    _change_plan(patch, change)


def _last_row_reads_the_pages_of_its_neighbour(patch: pytest.MonkeyPatch) -> None:
    def change(step: PagedStep) -> PagedStep:
        indptr = step.page_indptr.copy()
        first = indptr[-2]
        num_shared = min(indptr[1], indptr[-1] - first)
        page_ids = step.page_ids.copy()
        page_ids[first : first + num_shared] = page_ids[:num_shared]
        return replace(step, page_ids=page_ids)

    _change_plan(patch, change)


def _mask_hides_what_is_far_back(patch: pytest.MonkeyPatch) -> None:
    _change_window(patch, lambda window: 60 if window is None else window)


def _sliding_window_one_too_long(patch: pytest.MonkeyPatch) -> None:
    _change_window(patch, lambda window: None if window is None else window + 1)


def _change_plan(patch: pytest.MonkeyPatch, change: Callable[[PagedStep], PagedStep]) -> None:
    original = PagedStep.plan
    patch.setattr(PagedStep, "plan", lambda *args: [change(step) for step in original(*args)])


def _change_window(patch: pytest.MonkeyPatch, change: Callable[[int | None], int | None]) -> None:
    def changed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: original(*args[:-1], replace(args[-1], window=change(args[-1].window)))

    # Of a layer by itself, and of all in one call.
    for name in ("append_and_attend", "layer_step"):
        patch.setattr(PagedAttention, name, changed(getattr(PagedAttention, name)))


@pytest.mark.parametrize(
    "plant",
    [
        _position_off_by_one_in_later_turns,
        _two_pages_swapped_when_read,
        _key_written_beside_its_slot,
        _last_row_reads_the_pages_of_its_neighbour,
        _mask_hides_what_is_far_back,
    ],
)
@PATHS
def test_the_oracle_sees_a_planted_mistake(
    tiny_model: PreTrainedModel,
    plant: Plant,
    new_runner: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    # What is read where nobody wrote may be any bits: at times a pass fails over them before a logit can be wrong.
    with pytest.raises((AssertionError, InternalError)):
        check_incremental(tiny_model, range(VOCAB_SIZE), seed=2, num_sessions=5, new_runner=new_runner)


def test_the_oracle_sees_sessions_that_go_on_with_each_others_tokens(
    attending_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that running ahead invites."""
    original = InFlightStep.ids_of
    monkeypatch.setattr(InFlightStep, "ids_of", lambda self, following: original(self, following).roll(1))
    with pytest.raises(AssertionError):
        check_incremental(attending_model, range(VOCAB_SIZE), seed=7, num_sessions=8, new_runner=asynchronous_runner)


def test_the_oracle_sees_a_window_one_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.models import sliding_window

    _sliding_window_one_too_long(monkeypatch)
    with pytest.raises(AssertionError):
        check_incremental(sliding_window(), range(VOCAB_SIZE), seed=2, num_sessions=5)


@pytest.mark.parametrize("plant", [_position_off_by_one_in_later_turns, _two_pages_swapped_when_read])
def test_the_oracle_sees_a_planted_mistake_in_smollm2(
    smollm2: PreTrainedModel, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_incremental(smollm2, range(17, 49152), seed=1, num_sessions=4, num_turns=2, max_batch_tokens=128)
