"""Tests of snapshots.session_state: a session that was written down is the same session."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from microturn.errors import FailedPrecondition, InternalError
from microturn.sessions.inputs import TextInput
from microturn.sessions.session import Session
from microturn.snapshots.session_state import restore_session
from microturn.snapshots.snapshot import Snapshot
from support.fake_runner import FakeDriver
from support.held_text import HoldsText
from support.snapshots import KEY, find, live, saved

# What a snapshot does not hold, since it belongs to the server or to turns that are not done, or is counted again.
_NOT_SAVED = {"history", "table", "stored", "beat", "results", "last_activity_s", "running", "queued", "is_closing"} | {
    "counts",
    "speculation",
    "context",
    "codec",
}


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256)


def through_json(snapshot: Snapshot) -> Snapshot:
    """As a file would bring it back."""
    return replace(snapshot, state=json.loads(json.dumps(snapshot.state)))


def restored(driver: FakeDriver, **values: Any) -> tuple[Session, Session]:
    """A session, and the same one as another server of the model gets it."""
    live(driver, **KEY, **values)
    other = FakeDriver(max_context=256)
    return find(driver), restore_session(through_json(saved(driver, epoch=9)), other.engine.environment)


def test_every_field_of_a_session_comes_back(driver: FakeDriver) -> None:
    """A field that a session gets later is saved too, or named above."""
    session, again = restored(driver)
    for field in fields(Session):
        if field.name in ("epoch", "base_epoch"):
            assert getattr(again, field.name) == 9
        elif field.name == "opened_s":
            assert again.opened_s == pytest.approx(session.opened_s)
        elif field.name == "origin":
            assert (session.origin, again.origin) == ("new", "resumed")
        elif field.name not in _NOT_SAVED:
            assert getattr(again, field.name) == getattr(session, field.name), field.name
    assert (again.running, again.queued, again.is_closing, again.table.pages) == (None, deque(), False, [])


def test_every_token_embedding_and_mark_comes_back(driver: FakeDriver) -> None:
    session, again = restored(driver)
    assert again.context.token_ids == session.context.token_ids
    assert [span.start for span in again.context.embeds] == [span.start for span in session.context.embeds]
    for span, other in zip(again.context.embeds, session.context.embeds, strict=True):
        assert torch.equal(span.embeds, other.embeds)
    assert again.history.marks == session.history.marks
    assert len(again.history.marks) == 3


def test_every_recorded_result_comes_back(driver: FakeDriver) -> None:
    session, again = restored(driver)
    assert again.results.kept() == session.results.kept()
    assert len(again.results.kept()) == 3


def test_a_session_without_a_token_comes_back(driver: FakeDriver) -> None:
    driver.turn(1, start=True)
    again = restore_session(through_json(saved(driver)), driver.engine.environment)
    assert len(again.context) == 0


def test_its_age_goes_on_and_its_idle_time_begins_anew(driver: FakeDriver) -> None:
    live(driver)
    driver.clock.now_s += 20
    snapshot = through_json(saved(driver))
    driver.clock.now_s += 1000
    again = restore_session(snapshot, driver.engine.environment)
    assert driver.clock() - again.opened_s == pytest.approx(20)
    assert again.last_activity_s == driver.clock()


def test_text_states_that_are_equal_are_written_once(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True)
    for number in range(50):
        driver.turn(1, [number], max_tokens=1)
    snapshot = saved(driver)
    assert len(snapshot.tensors["marks"]) == 51
    assert len(snapshot.state["text_states"]) == 1


def test_text_that_is_held_is_written_a_few_times_however_many_turns_told_it() -> None:
    driver = FakeDriver(max_context=1024, new_codec=lambda _: HoldsText())
    driver.turn(1, [5], start=True, max_tokens=0)
    for _ in range(200):
        driver.turn(1, TextInput("01"), max_tokens=0)
    state = through_json(saved(driver)).state
    assert sorted(map(len, state["text_states"])) == [0, 400]


def test_a_session_of_another_model_is_refused(driver: FakeDriver) -> None:
    live(driver)
    other = FakeDriver(model_fingerprint="another")
    with pytest.raises(FailedPrecondition, match=r"saved with another model .*here another"):
        restore_session(saved(driver), other.engine.environment)


def test_a_session_that_is_longer_than_any_here_is_refused(driver: FakeDriver) -> None:
    live(driver)
    with pytest.raises(FailedPrecondition, match="needs room for 14 tokens, and max_context is 13 here"):
        restore_session(saved(driver), FakeDriver(max_context=13).engine.environment)
    assert restore_session(saved(driver), FakeDriver(max_context=14).engine.environment).max_context == 14


# ---- windows -------------------------------------------------------------------------------------------------------

WINDOW = {"overflow": "window", "sink_tokens": 4, "window_tokens": 9}


def windowed(**values: Any) -> FakeDriver:
    return FakeDriver(max_context=64, window_slack=4, **values)


@pytest.mark.parametrize("num_turns", [1, 3, 20])
def test_a_window_goes_on_sliding_as_it_would_have(num_turns: int) -> None:
    driver, other = windowed(), windowed()
    driver.turn(1, [1, 2, 3], start=True, max_tokens=2, **WINDOW)
    for number in range(num_turns):
        driver.turn(1, [number, number + 1], max_tokens=3)
    session = restore_session(through_json(saved(driver)), other.engine.environment)
    other.engine._sessions.add(session)
    assert (session.window, session.num_dropped) == (find(driver).window, find(driver).num_dropped)
    assert session.least_rewind == find(driver).least_rewind
    for given in ([9], [10, 11], [12]):
        expected, again = driver.turn(1, given, max_tokens=6), other.turn(1, given, max_tokens=6)
        assert again.token_ids == expected.token_ids
        assert (again.status.context_len, again.status.kept_len) == (
            expected.status.context_len,
            expected.status.kept_len,
        )
    evicted = other.turn(1, rewind_to=max(0, session.least_rewind - 1))
    assert evicted.code == ("FAILED_PRECONDITION" if session.least_rewind else None)


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"page_size": 8}, "no whole pages of 8"),
        ({"max_context": 20}, "needs room for 22 tokens, and max_context is 20 here"),
        ({"no_window_reason": "it is so"}, "not exact here: it is so"),
    ],
)
def test_a_window_that_cannot_be_kept_is_refused(values: dict[str, Any], refusal: str) -> None:
    driver = windowed()
    driver.turn(1, [1, 2, 3], start=True, max_tokens=2, **WINDOW)
    other = FakeDriver(max_context=values.get("max_context", 64), page_size=values.get("page_size", 4))
    environment = replace(other.engine.environment, no_window_reason=values.get("no_window_reason"))
    with pytest.raises(FailedPrecondition, match=refusal):
        restore_session(saved(driver), environment)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"state": {}},
        {"state": {"defaults": {"temperature": -1}}},
        {"state": {"defaults": {"unheard_of": 1}}},
        {"state": {"text_state": 7}},
        {"state": {"results": [{"number": 1}]}},
        {"tensors": {"marks": torch.tensor([[0, 99, 0]])}},
        {"tensors": {"marks": torch.tensor([[0, 3, 7]])}},
        {"tensors": {"embed_spans": torch.tensor([[13, 3]])}},
        {"tensors": {"embed_spans": torch.tensor([[3, 99]])}},
        {"tensors": {"token_ids": None}},
    ],
    ids=str,
)
def test_what_is_no_session_is_an_error_and_never_a_session(driver: FakeDriver, spoilt: dict[str, Any]) -> None:
    live(driver)
    snapshot = saved(driver)
    state = {**snapshot.state, **spoilt["state"]} if spoilt.get("state") else dict(snapshot.state)
    if spoilt.get("state") == {}:
        state = {}
    tensors = {**snapshot.tensors, **spoilt.get("tensors", {})}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(InternalError, match="has invalid content"):
        restore_session(replace(snapshot, state=state, tensors=tensors), driver.engine.environment)
