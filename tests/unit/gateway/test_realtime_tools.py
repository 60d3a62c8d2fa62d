"""Tools of a realtime session: calls as items, and their results as messages."""

from __future__ import annotations

from typing import Any

import pytest

from microturn_client import Tokens, ToolArguments, ToolCall, ToolCallBegun
from support.realtime_driver import Driver, error_of, types
from support.simulated_context import status_of

TOOL = {"type": "function", "name": "f", "description": "Does it", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g"}


@pytest.fixture
def tools(driver: Driver) -> Driver:
    driver.send("session.update", session={"tools": [TOOL]})
    [updated] = driver.taken()
    assert (updated["session"]["tools"], updated["session"]["tool_choice"]) == ([TOOL], "auto")
    return driver


def call(driver: Driver, text: str = "", finish_reason: str = "stop") -> list[dict[str, Any]]:
    """The model says something, then calls."""
    driver.item("Hello")
    driver.send("response.create")
    driver.answer(driver.begin())
    driver.begin()
    end = len(driver.server) + 3
    driver.realtime.tokens(Tokens(text, (1,), end - 2), 5.0)
    driver.realtime.tokens(Tokens("", (2,), end - 1), 6.0)
    for event in (
        ToolCallBegun("call_1", "f"),
        ToolArguments("call_1", '{"a":'),
        ToolArguments("call_1", "1}"),
        ToolCall("call_1", "f", {"a": 1}, '{"a":1}'),
    ):
        driver.realtime.tokens(event, 7.0)
    driver.server.tokens += ["<assistant>", "call", "end"]
    driver.server._role = "assistant"
    driver.realtime.ended(status_of(end, finish_reason=finish_reason), 9.0)
    return driver.run()


def result(driver: Driver, output: str, call_id: str = "call_1") -> None:
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    driver.send("conversation.item.create", item=item)


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


def test_tools_are_fixed_with_the_first_turn_and_the_rest_is_updated(tools: Driver) -> None:
    tools.item("Hello")
    tools.run()
    tools.send("session.update", session={"tools": [OTHER], "max_output_tokens": 7})
    updated, error = tools.run()
    assert (updated["session"]["tools"], updated["session"]["max_output_tokens"]) == ([TOOL], 7)
    assert error["error"]["param"] == "session.tools"
    tools.send("session.update", session={"tools": [TOOL]})
    assert types(tools.run()) == ["session.updated"]


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
