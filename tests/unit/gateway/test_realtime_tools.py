"""Tools of a realtime session: calls as items, and their results as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from microturn_client import Tokens, ToolArguments, ToolCall, ToolCallBegun, ToolEvent
from support.realtime_driver import Driver, error_of, types
from support.simulated_context import SimulatedContext, status_of

TOOL = {"type": "function", "name": "f", "description": "Does it", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g"}
WHEN = ("added", "done")


@pytest.fixture
def tools(driver: Driver) -> Driver:
    driver.send("session.update", session={"tools": [TOOL]})
    [updated] = driver.taken()
    assert (updated["session"]["tools"], updated["session"]["tool_choice"]) == ([TOOL], "auto")
    return driver


ONE: tuple[ToolEvent, ...] = (
    ToolCallBegun("call_1", "f"),
    ToolArguments("call_1", '{"a":'),
    ToolArguments("call_1", "1}"),
    ToolCall("call_1", "f", {"a": 1}, '{"a":1}'),
)
TWO: tuple[ToolEvent, ...] = (
    ToolCallBegun("call_2", "f"),
    ToolArguments("call_2", '{"a":2}'),
    ToolCall("call_2", "f", {"a": 2}, '{"a":2}'),
)
BROKEN_OFF: tuple[ToolEvent, ...] = (
    ToolCallBegun("call_2", "f"),
    ToolArguments("call_2", '{"a":'),
    ToolCall("call_2", "f", None, '{"a":'),
)


def call(
    driver: Driver, text: str = "", finish_reason: str = "stop", told: Sequence[ToolEvent] = ONE
) -> list[dict[str, Any]]:
    """The model says something, then calls."""
    driver.item("Hello")
    driver.send("response.create")
    driver.answer(driver.begin())
    driver.begin()
    end = len(driver.server) + 3
    driver.realtime.tokens(Tokens(text, (1,), end - 2), 5.0)
    driver.realtime.tokens(Tokens("", (2,), end - 1), 6.0)
    for event in told:
        driver.realtime.tokens(event, 7.0)
    driver.server.tokens += ["<assistant>", "call", "end"]
    driver.server._role = "assistant"
    driver.realtime.ended(status_of(end, finish_reason=finish_reason), 9.0)
    return driver.run()


def result(driver: Driver, output: str, call_id: str = "call_1") -> None:
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    driver.send("conversation.item.create", item=item)


def test_a_result_without_text_is_one(tools: Driver) -> None:
    """As in chat completions and responses."""
    call(tools)
    result(tools, "")
    assert types(tools.run()) == ["conversation.item.added", "conversation.item.done"]
    assert tools.server.text.endswith("<tool>null")


def test_a_call_is_an_item(tools: Driver) -> None:
    events = call(tools)
    assert types(events)[-8:] == [
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    response = events[-1]["response"]
    [item] = response["output"]
    assert response["status"] == "completed"
    assert (item["type"], item["name"], item["call_id"], item["arguments"]) == (
        "function_call",
        "f",
        "call_1",
        '{"a":1}',
    )


@pytest.mark.parametrize("text", ["", " I look. "])
def test_several_calls_in_one_answer_are_items_in_their_order(tools: Driver, text: str) -> None:
    events = call(tools, text, told=(*ONE, *TWO))
    calls = [event for event in events if event.get("item", {}).get("type") == "function_call"]
    added, done = ([event for event in calls if event["type"] == f"response.output_item.{when}"] for when in WHEN)
    first_index = int(bool(text))
    assert [event["output_index"] for event in added] == [first_index, first_index + 1]
    assert [(event["item"]["call_id"], event["item"]["arguments"]) for event in done] == [
        ("call_1", '{"a":1}'),
        ("call_2", '{"a":2}'),
    ]
    arguments: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["item_id"]] = arguments.get(event["item_id"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message"] * first_index + ["function_call"] * 2
    assert arguments == {item["id"]: item["arguments"] for item in output[first_index:]}
    for when in WHEN:
        follows = {
            event["item"]["id"]: event["previous_item_id"]
            for event in events
            if event["type"] == f"conversation.item.{when}"
        }
        ids = [item["id"] for item in output]
        assert [follows[after] for after in ids[1:]] == ids[:-1]


@pytest.mark.parametrize("finish_reason", ["interrupted", "stop", "length"])
def test_where_calls_are_not_parallel_an_answer_is_complete_with_the_first(tools: Driver, finish_reason: str) -> None:
    tools.send("session.update", session={"parallel_tool_calls": False})
    assert tools.taken()[0]["session"]["parallel_tool_calls"] is False
    before = tools.server.text
    events = call(tools, told=(*ONE, *TWO), finish_reason=finish_reason)
    assert tools.realtime.take_interrupt()
    assert not tools.realtime.take_interrupt()
    response = events[-1]["response"]
    assert (response["status"], [item["call_id"] for item in response["output"]]) == ("completed", ["call_1"])
    assert not any(event.get("call_id") == "call_2" for event in events)
    result(tools, "one")
    tools.run()
    told = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert tools.server.text == f"{before}<user>Hello<assistant>{told}<tool>one"


def test_a_response_says_by_itself_whether_calls_are_parallel(tools: Driver) -> None:
    tools.send("session.update", session={"parallel_tool_calls": False})
    tools.item("Hello")
    tools.send("response.create", response={"parallel_tool_calls": True})
    tools.answer(tools.begin())
    tools.begin()
    for event in (*ONE, *TWO):
        tools.realtime.tokens(event, 7.0)
    assert not tools.realtime.take_interrupt()


def test_results_of_several_calls_are_told_and_nothing_again(tools: Driver) -> None:
    call(tools, told=(*ONE, *TWO))
    num_steps = len(tools.steps)
    result(tools, "one")
    result(tools, "two", "call_2")
    tools.send("response.create")
    tools.run()
    *told, answered = tools.steps[num_steps:]
    options = {"max_tokens": 0, "role": "tool"}
    assert [(step.message and step.message.content, step.options) for step in told] == [
        ("one", options),
        ("two", options),
    ]
    assert "rewind_to" not in answered.options


def test_results_are_told_in_the_order_of_their_calls(tools: Driver) -> None:
    """A chat template shows no ids: results in the order in which they came would be taken for each other's."""
    before = call(tools, told=(*ONE, *TWO))[-1]["response"]["output"][-1]["id"]
    result(tools, "two", "call_2")
    result(tools, "one")
    events = tools.run()
    assert tools.server.text.endswith("<tool>onetwo")
    added = [event for event in events if event["type"] == "conversation.item.added"]
    assert [event["item"]["output"] for event in added] == ["two", "one"]
    assert [event["previous_item_id"] for event in added] == [before, added[0]["item"]["id"]]


def test_results_that_something_stands_between_stay_where_they_are(tools: Driver) -> None:
    """What the model answered to the first of them is not taken back."""
    call(tools, told=(*ONE, *TWO))
    num_steps = len(tools.steps)
    result(tools, "two", "call_2")
    tools.send("response.create")
    result(tools, "one")
    tools.run()
    assert tools.server.text.endswith("<tool>two<assistant>Hi there<tool>one")
    assert not any("rewind_to" in step.options for step in tools.steps[num_steps:])


def test_results_are_in_the_order_of_the_latest_calls_also_behind_what_a_user_said_meanwhile(tools: Driver) -> None:
    """Ids may come again in each answer."""
    call(tools, told=(*TWO, *ONE))
    call(tools, told=(*ONE, *TWO))
    tools.item("Well?")
    for output, call_id in (("nobody's", "call_3"), ("two", "call_2"), ("one", "call_1")):
        result(tools, output, call_id)
    tools.run()
    assert tools.server.text.endswith("<user>Well?<tool>onetwonobody's")


def test_a_cancel_within_a_calls_arguments_leaves_it_incomplete_and_those_before_it_whole(tools: Driver) -> None:
    events = call(tools, finish_reason="interrupted", told=(*ONE, *BROKEN_OFF))
    response = events[-1]["response"]
    assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    assert [(item["call_id"], item["status"], item["arguments"]) for item in response["output"]] == [
        ("call_1", "completed", '{"a":1}'),
        ("call_2", "incomplete", '{"a":'),
    ]
    last_done = [event for event in events if event["type"] == "response.function_call_arguments.done"][-1]
    assert (last_done["call_id"], last_done["arguments"]) == ("call_2", '{"a":')
    num_steps = len(tools.steps)
    tools.item("Never mind")
    tools.send("response.create")
    tools.run()
    said = [step.message.content for step in tools.steps[num_steps:] if step.message is not None]
    assert said == ["Never mind"]
    assert not any("rewind_to" in step.options for step in tools.steps[num_steps:])


def test_a_call_that_was_broken_off_is_deleted_with_its_answer(tools: Driver) -> None:
    output = call(tools, finish_reason="interrupted", told=BROKEN_OFF)[-1]["response"]["output"]
    tools.send("conversation.item.delete", item_id=output[0]["id"])
    assert types(tools.run()) == ["conversation.item.deleted"]
    assert tools.server.text == "<user>Hello"


@pytest.mark.parametrize("text", ["", " I look. "])
def test_results_are_appended_each_as_a_message_and_nothing_is_told_again(tools: Driver, text: str) -> None:
    output = call(tools, text)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message"] * bool(text) + ["function_call"]
    num_steps = len(tools.steps)
    result(tools, "one")
    result(tools, "two", "call_2")
    tools.run()
    told = [(step.message and step.message.content, step.options) for step in tools.steps[num_steps:]]
    options = {"max_tokens": 0, "role": "tool"}
    assert told == [("one", options), ("two", options)]


def test_a_call_that_was_cancelled_leaves_a_conversation_that_goes_on(tools: Driver) -> None:
    assert call(tools, finish_reason="interrupted")[-1]["response"]["status"] == "cancelled"
    num_steps = len(tools.steps)
    result(tools, "one")
    tools.run()
    [step] = tools.steps[num_steps:]
    assert "rewind_to" not in step.options


def test_calls_are_retrieved_and_deleted_and_not_truncated(tools: Driver) -> None:
    item_id = call(tools)[-1]["response"]["output"][0]["id"]
    tools.send("conversation.item.truncate", item_id=item_id)
    assert error_of(tools.run())["param"] == "item_id"
    tools.send("conversation.item.retrieve", item_id=item_id)
    tools.send("conversation.item.delete", item_id=item_id)
    retrieved, deleted = tools.run()
    assert retrieved["item"]["type"] == "function_call"
    assert deleted["type"] == "conversation.item.deleted"
    assert tools.server.text == "<user>Hello"


def test_other_tools_begin_the_context_anew_for_what_comes_behind_them(tools: Driver) -> None:
    """Pipecat and agents that hand over change the tools in the middle of a session."""
    call(tools)
    before, num_steps = tools.realtime.talk.context, len(tools.steps)
    result(tools, "one")
    tools.send("session.update", session={"tools": [OTHER]})
    tools.item("And now?")
    step = tools.begin()
    assert (tools.realtime.talk.tools, tools.realtime.talk.context) == ((TOOL,), before), (
        "the result came before the update"
    )
    tools.answer(step)
    tools.server = SimulatedContext()
    events = tools.run()
    assert types(events)[:2] == ["session.updated", "conversation.item.added"]
    assert tools.realtime.talk.tools == (OTHER,)
    assert tools.realtime.talk.context is not before
    told = [(step.message.role, step.message.content) for step in tools.steps[num_steps + 1 :] if step.message]
    assert [role for role, _ in told] == ["user", "assistant", "tool", "user"]
    assert '{"name": "f", "arguments": {"a": 1}}' in told[1][1]
    assert all("rewind_to" not in step.options for step in tools.steps)


def test_the_same_tools_change_nothing(tools: Driver) -> None:
    tools.item("Hello")
    tools.run()
    before = tools.realtime.talk.context
    tools.send("session.update", session={"tools": [TOOL]})
    tools.item("And now?")
    tools.run()
    assert tools.realtime.talk.context is before
    assert len(tools.steps) == 2


def test_tools_that_come_and_go_between_turns_leave_a_context_that_no_session_has(tools: Driver) -> None:
    """A job that needs no turn, or fails, must not leave a context that a session is thought to hold."""
    tools.item("Hello")
    tools.run()
    before = tools.realtime.talk.context
    tools.send("session.update", session={"tools": [OTHER]})
    tools.send("conversation.item.delete", item_id="nothing")
    tools.send("session.update", session={"tools": [TOOL]})
    tools.send("conversation.item.delete", item_id="nothing")
    tools.run()
    assert tools.realtime.talk.context is not before
    assert tools.realtime.talk.context.context_len == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_choice_may_come_before_the_tools(driver: Driver, choice: Any) -> None:
    """Pipecat configures its session before it has the tools, and takes any error for the end of the session."""
    driver.send("session.update", session={"tool_choice": choice})
    [updated] = driver.taken()
    assert updated["session"]["tool_choice"] == choice
    driver.send("response.create")
    assert error_of(driver.run())["param"] == "response.tool_choice"
    driver.send("session.update", session={"tools": [TOOL]})
    driver.item("Hello")
    driver.send("response.create")
    driver.run()
    assert driver.steps[-1].options["tool_choice"] == (choice if isinstance(choice, str) else "f")


def test_a_choice_of_another_tool_is_refused(tools: Driver) -> None:
    tools.send("session.update", session={"tool_choice": {"type": "function", "name": "g"}})
    updated, error = tools.run()
    assert updated["session"]["tool_choice"] == "auto"
    assert error["error"]["param"] == "session.tool_choice"


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ("required", {"tool_choice": "required"}),
        ({"type": "function", "name": "f"}, {"tool_choice": "f"}),
        ("auto", {}),
    ],
)
def test_a_response_chooses(tools: Driver, choice: Any, options: dict[str, str]) -> None:
    tools.item("Hello")
    tools.send("response.create", response={"tool_choice": choice, "tools": [TOOL]})
    tools.run()
    told = tools.steps[-1].options
    assert {name: value for name, value in told.items() if name == "tool_choice"} == options


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [OTHER]), ("tool_choice", {"type": "function", "name": "g"}), ("tool_choice", "none")],
)
def test_a_response_has_the_tools_of_its_session(tools: Driver, field: str, value: Any) -> None:
    tools.send("response.create", response={field: value})
    assert error_of(tools.run())["param"] == f"response.{field}"
