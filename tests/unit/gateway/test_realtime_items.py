"""Items that are added, cut, taken out and asked for: the server's context becomes what is left."""

from __future__ import annotations

import pytest

from microturn_gateway.failures import Refusal
from support.realtime_driver import Driver, error_of, types


@pytest.mark.parametrize(
    ("heard", "text"),
    [
        ({"audio_end_ms": 200}, "Hi"),  # three characters at fifteen a second: a token and a bit
        ({"audio_end_ms": 0, "text_end_chars": 2}, "Hi"),
        ({"audio_end_ms": 0, "text_end_chars": 1}, ""),
        ({"audio_end_ms": 60_000}, "Hi there"),
    ],
)
def test_an_answer_is_truncated_to_the_tokens_that_were_heard(driver: Driver, heard: dict[str, int], text: str) -> None:
    driver.item("Hello")
    driver.send("response.create")
    item_id = driver.run()[-1]["response"]["output"][0]["id"]
    driver.send("conversation.item.truncate", item_id=item_id, content_index=0, **heard)
    [truncated] = driver.run()
    assert truncated["type"] == "conversation.item.truncated"
    assert truncated["text"] == text
    driver.item("So?")
    driver.run()
    assert driver.server.text == "<user>Hello" + (f"<assistant>{text}<user>So?" if text else "\nSo?")


def test_truncating_the_answer_that_runs_interrupts_it(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("response.create")
    driver.answer(driver.begin())
    step = driver.begin()
    assert step.response is not None
    driver.send("conversation.item.truncate", item_id=step.response.item_id, content_index=0, audio_end_ms=0)
    assert driver.realtime.take_interrupt()
    driver.send("conversation.item.truncate", item_id=step.response.item_id, content_index=0, audio_end_ms=0)
    driver.answer(step)
    assert types(driver.run())[-2:] == ["conversation.item.truncated"] * 2


def test_items_are_inserted_deleted_and_asked_for(driver: Driver) -> None:
    driver.item("one", item_id="one")
    driver.item("two", "system", item_id="two")
    driver.item("zero", "system", item_id="zero", previous_item_id="root")
    driver.item("half", "system", item_id="half", previous_item_id="one")
    driver.run()
    assert driver.server.text == "<system>zero<user>one<system>half\ntwo"
    driver.send("conversation.item.delete", item_id="half")
    driver.send("conversation.item.retrieve", item_id="two")
    deleted, retrieved = driver.run()
    assert (deleted["type"], deleted["item_id"]) == ("conversation.item.deleted", "half")
    assert retrieved["item"]["content"][0]["text"] == "two"
    driver.item("end")
    driver.run()
    assert driver.server.text == "<system>zero<user>one<system>two<user>end"


@pytest.mark.parametrize("kind", ["delete", "retrieve", "truncate"])
def test_an_item_that_is_not_there_is_said_so(driver: Driver, kind: str) -> None:
    driver.send(f"conversation.item.{kind}", item_id="nobody")
    error = error_of(driver.run())
    assert (error["code"], error["event_id"], error["param"]) == ("item_not_found", "mine", "item_id")


def test_instructions_come_first_and_may_change(driver: Driver) -> None:
    driver.send("session.update", session={"type": "realtime", "instructions": "Be brief."})
    driver.item("Hello")
    driver.run()
    assert driver.server.text == "<system>Be brief.<user>Hello"
    driver.send("session.update", session={"instructions": "Be long."})
    driver.item("Well?")
    driver.run()
    assert driver.server.text == "<system>Be long.<user>Hello\nWell?"


def test_an_edit_that_fails_is_made_up_for_by_the_next(driver: Driver) -> None:
    """The server's context was not cut, though the gateway had let go of what stands behind."""
    driver.item("one", "system", item_id="one")
    driver.item("two", item_id="two")
    driver.run()
    driver.send("conversation.item.delete", item_id="two")
    assert driver.begin().options == {"max_tokens": 0, "rewind_to": 4}
    driver.realtime.failed(Refusal("unavailable", "not now", http_status=503))
    driver.item("three")
    driver.run()
    assert driver.server.text == "<system>one<user>two\nthree"
