"""The protocol of a realtime session: what a client sends, which turns that takes, and what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from microturn_client import Tokens, Usage
from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal
from microturn_gateway.realtime import Step
from support.realtime_driver import BEAT_S, Driver, error_of, types
from support.simulated_context import status_of


def test_an_item_and_its_answer(driver: Driver) -> None:
    driver.item("Hello", item_id="item_1")
    driver.send("response.create", response={"metadata": {"a": "b"}})
    events = driver.run()
    assert types(events) == [
        "response.created",
        "conversation.item.added",
        "conversation.item.done",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert driver.steps[0] == Step(Message("user", "Hello"), {"max_tokens": 0, "role": "user"})
    assert driver.options == {"role": "assistant", "max_tokens": 100}
    done = events[-1]["response"]
    assert done["status"] == "completed"
    assert done["metadata"] == {"a": "b"}
    assert done["output"][0]["content"] == [{"type": "output_text", "text": "Hi there"}]
    # <user>Hello is there when the answer is asked for; <assistant> is what its turn adds.
    assert done["usage"]["input_tokens"] == 7
    assert done["usage"]["input_token_details"]["cached_tokens"] == 6
    assert done["usage"]["output_tokens"] == 2
    assert done["microturn"]["first_text_ms"] == 10.0
    assert len({event["event_id"] for event in driver.events}) == len(driver.events)


def test_text_waits_for_its_beat_and_grows(driver: Driver) -> None:
    driver.send("input_text_buffer.append", text="so ")
    assert types(driver.run()) == ["input_text_buffer.appended"]
    driver.now_s += 0.1
    for text in ("the ", "first"):
        driver.send("input_text_buffer.append", text=text)
    assert driver.run() == []
    assert driver.realtime.wake_at == pytest.approx(100.0 + BEAT_S)
    driver.now_s = driver.realtime.wake_at
    [appended] = driver.run()
    assert appended["text"] == "the first"
    assert appended["microturn"] == {
        "latency_ms": 5.0,
        "server_ms": 1.0,
        "context_len": 13,
        "kept_len": 13,
        "input_tokens": 9,
        "computed_tokens": 9,
        "kv": "in place",
    }
    assert [step.message for step in driver.steps] == [Message("user", "so "), Message("user", "the first")]


def test_what_comes_while_a_turn_runs_is_one_micro_turn(driver: Driver) -> None:
    driver.send("input_text_buffer.append", text="a")
    step = driver.begin()
    for text in "bcd":
        driver.send("input_text_buffer.append", text=text)
    assert driver.realtime.wake_at is None
    driver.answer(step)
    driver.now_s += 1
    assert [event["text"] for event in driver.run()] == ["a", "bcd"]


def test_a_commit_does_not_wait_for_the_beat(driver: Driver) -> None:
    driver.send("input_text_buffer.append", text="so ")
    driver.run()
    driver.send("input_text_buffer.append", text="what?")
    driver.send("input_text_buffer.commit")
    events = driver.run()
    assert types(events) == [
        "input_text_buffer.appended",
        "input_text_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    assert events[2]["item"]["content"] == [{"type": "input_text", "text": "so what?"}]
    assert events[2]["item"]["status"] == "completed"
    assert events[1]["item_id"] == events[2]["item"]["id"]


def test_a_response_commits_the_buffer(driver: Driver) -> None:
    driver.send("input_text_buffer.append", text="Hello")
    driver.send("response.create")
    assert "input_text_buffer.committed" in types(driver.run())
    assert driver.server.text == "<user>Hello<assistant>Hi there"


def test_a_cleared_buffer_leaves_the_context(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("input_text_buffer.append", text="abc")
    driver.send("input_text_buffer.clear")
    assert types(driver.run())[-1] == "input_text_buffer.cleared"
    # Both lines are one message: what goes is what the second added.
    assert driver.server.text == "<user>Hello"
    driver.send("input_text_buffer.commit")
    assert error_of(driver.run())["code"] == "input_text_buffer_empty"


def test_token_ids_are_appended_as_they_are(driver: Driver) -> None:
    driver.send("input_text_buffer.append", token_ids=[5, 6])
    [appended] = driver.run()
    assert appended["token_ids"] == [5, 6]
    driver.send("input_text_buffer.append", text="x")
    driver.now_s += 1
    assert error_of(driver.run())["code"] == "invalid_value"
    driver.send("input_text_buffer.commit")
    assert driver.run()[1]["item"]["content"] == [{"type": "input_tokens", "token_ids": [5, 6]}]


def test_a_running_answer_is_interrupted_and_what_was_said_stays(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("response.create")
    driver.answer(driver.begin())
    step = driver.begin()
    assert driver.realtime.is_answering
    driver.realtime.tokens(Tokens("Hi", (1,), 7), 10.0)
    driver.send("response.cancel")
    assert driver.realtime.take_interrupt()
    assert not driver.realtime.take_interrupt()
    driver.server.answer(["Hi"])
    status = status_of(len(driver.server), finish_reason="interrupted", usage=Usage(1, 1, 2, 0))
    driver.realtime.ended(status, 20.0)
    done = driver.run()[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    assert done["output"][0]["status"] == "incomplete"
    assert step.response is not None
    driver.item("Wait")
    driver.run()
    assert driver.server.text == "<user>Hello<assistant>Hi<user>Wait"


def test_a_response_that_has_not_begun_is_cancelled_without_a_turn(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("response.create")
    step = driver.begin()
    driver.send("response.cancel")
    assert not driver.realtime.take_interrupt()
    driver.answer(step)
    assert driver.run()[-1]["response"]["status"] == "cancelled"
    assert driver.server.text == "<user>Hello"
    driver.send("response.cancel")
    assert error_of(driver.run())["code"] == "response_cancel_not_active"


def test_one_response_at_a_time_but_the_next_may_wait_for_one_that_is_cancelled(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("response.create")
    driver.answer(driver.begin())
    step = driver.begin()
    driver.send("response.create")
    assert error_of(driver.taken())["code"] == "conversation_already_has_active_response"
    driver.send("response.cancel")
    driver.send("response.create")
    driver.answer(step)
    assert types(driver.run()).count("response.done") == 2


def test_a_response_takes_what_the_session_says_unless_it_says_otherwise(driver: Driver) -> None:
    driver.send("session.update", session={"max_output_tokens": 7, "microturn": {"temperature": 0.5, "seed": 3}})
    driver.item("Hello")
    driver.send("response.create", response={"microturn": {"seed": 4}})
    driver.run()
    assert driver.steps[-1].options == {"role": "assistant", "max_tokens": 7, "temperature": 0.5, "seed": 4}


def test_what_is_said_behind_an_answer_that_ended_is_of_its_message(driver: Driver) -> None:
    """The server's context refuses text of a message behind the token that ended it."""
    driver.do_answers_end = True
    driver.item("Hello")
    driver.send("response.create")
    driver.run()
    said = len(driver.server)
    driver.item(" Is there more?", "assistant")
    driver.item("No")
    driver.run()
    assert [step.options.get("rewind_to") for step in driver.steps] == [None, None, said - 1, None]
    driver.send("response.create")
    driver.send("response.cancel")
    driver.send("response.create")
    driver.run()
    assert driver.server.text == "<user>Hello<assistant>Hi there Is there more?<user>No<assistant>Hi there"


def test_an_answer_that_ended_goes_on_where_another_is_asked_for(driver: Driver) -> None:
    driver.do_answers_end = True
    driver.item("Hello")
    for _ in range(2):
        driver.send("response.create")
        driver.run()
    assert driver.server.text == "<user>Hello<assistant>Hi thereHi there"
    item = driver.realtime.talk.conversation.items[-1].id
    driver.send("conversation.item.retrieve", item_id=item)
    assert types(driver.run()) == ["conversation.item.retrieved"]
    assert len(driver.steps) == 3


def test_each_answer_has_a_seed_of_its_own(driver: Driver) -> None:
    driver.item("Hello")
    for _ in range(2):
        driver.send("response.create")
        answer = driver.run()[-1]["response"]["output"][0]["id"]
        driver.send("conversation.item.delete", item_id=answer)
    one, other = [step.options["seed"] for step in driver.steps if step.response is not None]
    assert one != other
    assert all(0 <= seed < 2**63 for seed in (one, other))


def test_an_answer_without_a_limit_gets_the_room_that_there_is(driver: Driver) -> None:
    """It was worked out from what the server had told, which says nothing of text that it holds."""
    driver.item("x" * 100)
    driver.send("response.create")
    driver.answer(driver.begin())
    assert driver.begin().options["max_tokens"] == 100
    driver.realtime.failed(Refusal("context_full", "too much", room=35))
    assert driver.run()[-1]["response"]["status"] == "completed"
    assert driver.steps[-1].options["max_tokens"] == 35


@pytest.mark.parametrize(("options", "rooms"), [({}, [35, 34]), ({}, [0]), ({"max_output_tokens": 60}, [35])])
def test_an_answer_that_finds_no_room_fails(driver: Driver, options: dict[str, Any], rooms: list[int]) -> None:
    driver.item("x" * 100)
    driver.send("response.create", response=options)
    driver.answer(driver.begin())
    for room in rooms:
        assert driver.begin().response is not None
        driver.realtime.failed(Refusal("context_full", "too much", room=room))
    assert driver.run()[-1]["response"]["status"] == "failed"
    assert len(driver.steps) == 1 + len(rooms)


def test_an_answer_that_is_cancelled_before_it_finds_room_is_not_asked_for_again(driver: Driver) -> None:
    driver.item("x" * 100)
    driver.send("response.create")
    driver.answer(driver.begin())
    driver.begin()
    driver.send("response.cancel")
    driver.realtime.failed(Refusal("context_full", "too much", room=35))
    assert driver.run()[-1]["response"]["status"] == "cancelled"
    assert len(driver.steps) == 2
