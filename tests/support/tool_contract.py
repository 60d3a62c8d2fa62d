"""What a program may rely on that has tools: run against the fake server, and against the real one."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from microturn_client import (
    Client,
    InvalidArgument,
    Session,
    Tokens,
    ToolArguments,
    ToolCall,
    ToolCallBegun,
    ToolEvent,
    TurnEnd,
)

CITIES = ["Bern", "Basel", "Chur"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How the weather is in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {"name": "stop_music"}
TOOLS = [WEATHER, STOP]
CALL = '<tool_call>{"name": "f"}</tool_call>'
RESULT = {"temperature": 21, "sky": "clear"}
GENERATE: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
FORCED: dict[str, Any] = {"max_tokens": 100, "tool_choice": "get_weather"}
# What an answer in text must be.
REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}, "is_warm": {"type": "boolean"}},
    "required": ["sky", "is_warm"],
    "additionalProperties": False,
}


def called_in(session: Session) -> ToolCall:
    """The one call of the answer to a question."""
    answer = session.ask("How warm is it in Bern?", **FORCED).collect()
    (call,) = answer.tool_calls
    assert answer.status.finish_reason == "complete"
    assert answer.text == "", "a call is no speech"
    return call


def check_report(text: str) -> None:
    """Whether a text has the format."""
    report = json.loads(text)
    assert report.keys() == {"sky", "is_warm"}
    assert report["sky"] in ("clear", "cloudy")
    assert isinstance(report["is_warm"], bool)


def context_of(session: Session) -> list[int]:
    """The ids of a session whose turns asked for those that their inputs became."""
    return [token_id for turn in session.transcript for token_id in (*(turn.input_ids or ()), *turn.answer_ids)]


class ToolContract:
    """Tests with a fixture ``client``, of a server whose model has a chat template with tools."""

    def test_a_call_comes_as_it_is_written(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            events = list(session.ask("How warm is it in Bern?", **FORCED))
            end = events.pop()
            assert isinstance(end, TurnEnd)
            assert end.status.finish_reason == "complete"
            begun, *pieces, call = [event for event in events if isinstance(event, ToolEvent)]
            assert isinstance(begun, ToolCallBegun)
            assert isinstance(call, ToolCall)
            assert (begun.id, begun.name) == (call.id, call.name) == (call.id, "get_weather")
            assert len(pieces) > 1, "arguments come before they are whole"
            assert "".join(piece.json for piece in pieces if isinstance(piece, ToolArguments)) == call.json
            assert call.arguments is not None
            assert call.arguments["city"] in CITIES
            assert 1 <= call.arguments["days"] <= 9
            tokens = [event for event in events if isinstance(event, Tokens)]
            assert "".join(event.text for event in tokens) == ""
            assert sum(len(event.ids) for event in tokens) == end.status.usage.output_tokens

    def test_one_of_the_tools_is_called_where_that_is_required(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            answer = session.ask("Music off!", max_tokens=120, tool_choice="required").collect()
            is_whole = answer.status.finish_reason == "complete"
            calls = answer.tool_calls if is_whole else answer.tool_calls[:-1]  # a small model calls without end
            assert calls
            for call in calls:
                assert call.name in ("get_weather", "stop_music")
                assert call.arguments is not None

    def test_after_a_result_only_the_result_and_the_template_are_computed(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            session.append("You know the weather everywhere. " * 20, role="system")
            call = called_in(session)
            before = session.context_len
            told = session.tool_result(call, RESULT, max_tokens=0, return_appended_ids=True).wait()
            answer = session.turn(None, role="assistant", return_appended_ids=True, **GENERATE).collect().status
            num_new = told.usage.input_tokens + answer.usage.input_tokens
            assert answer.context_len == before + num_new + answer.usage.output_tokens
            # The last token before a turn is computed with it, and the last one that it says is not.
            assert told.usage.computed_tokens + answer.usage.computed_tokens <= num_new + answer.usage.output_tokens
            assert num_new < 60 < before

    def test_a_result_is_answered(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session, client.session(tools=TOOLS) as by_hand:
            answer = session.tool_result(called_in(session), "21 degrees", **GENERATE).collect()
            called_in(by_hand)
            by_hand.append("21 degrees", role="tool")
            assert answer.ids == by_hand.turn(None, role="assistant", **GENERATE).collect().ids
            assert answer.tool_calls == ()

    def test_what_the_user_says_meanwhile_is_in_the_context_in_its_order(self, client: Client) -> None:
        """The tool runs in a thread of its own, and its result comes when it comes."""
        with client.session(tools=TOOLS, return_appended_ids=True) as session:
            call = called_in(session)
            has_spoken, result = threading.Event(), []

            def run_tool() -> None:
                has_spoken.wait(10)
                result.append(session.tool_result(call, RESULT, **GENERATE).collect())

            tool = threading.Thread(target=run_tool)
            tool.start()
            for chunk in ("And tell me ", "when it ", "rains."):
                session.append(chunk, role="user")
            has_spoken.set()
            tool.join(30)
            (answer,) = result
            said = [turn.text for turn in session.transcript if turn.text]
            assert said[1:4] == ["And tell me ", "when it ", "rains."]
            assert said[4] == '{"temperature": 21, "sky": "clear"}'
            context = context_of(session)
            assert len(context) == session.context_len
            # The oracle: whoever is told the same ids says the same.
            num_before = len(context) - len(answer.ids)
            with client.session() as other:
                assert list(other.turn(context[:num_before], **GENERATE).collect().ids) == context[num_before:]

    def test_results_of_several_calls_are_given_in_their_order(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            call = called_in(session)
            first = session.tool_result(call, "one", max_tokens=0).wait()
            assert first.finish_reason == "append"
            assert session.tool_result(call, "two", **GENERATE).collect().status.usage.output_tokens == 12

    def test_a_result_that_is_neither_text_nor_json_is_refused_and_another_one_taken(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            call = called_in(session)
            with pytest.raises(InvalidArgument, match="result of 'get_weather' is neither text nor JSON"):
                session.tool_result(call, object())
            assert session.tool_result(call, RESULT, **GENERATE).collect().ids

    def test_a_tool_that_is_not_there_cannot_be_forced(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            session.append("Hello. ", role="user")
            with pytest.raises(InvalidArgument, match="no such tool"):
                session.turn(None, role="assistant", max_tokens=9, tool_choice="get_money").wait()
            assert called_in(session).name == "get_weather"

    def test_an_answer_with_a_format_is_a_value_of_it_or_calls(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            for question in ("How warm is it in Bern?", "Music off!", "Are you there?"):
                answer = session.ask(question, max_tokens=60, json_schema=REPORT, temperature=0.7, seed=3).collect()
                if not answer.tool_calls:
                    assert answer.status.finish_reason == "complete"
                    check_report(answer.text)
                    continue
                assert answer.text.strip() == ""
                is_whole = answer.status.finish_reason == "complete"
                for call in answer.tool_calls if is_whole else answer.tool_calls[:-1]:
                    assert call.name in ("get_weather", "stop_music")
                    assert call.arguments is not None

    @pytest.mark.parametrize("choice", ["none", "get_weather"])
    def test_beside_a_format_a_value_goes_on_and_so_does_a_call(self, client: Client, choice: str) -> None:
        """What was begun under one of the two alone, where the model may choose."""
        with client.session(tools=TOOLS) as session:
            cut = session.ask("How warm is it?", max_tokens=6, tool_choice=choice, json_schema=REPORT).collect()
            assert cut.status.finish_reason == "length"
            start = cut.status.context_len - len(cut.ids)
            rest = session.turn(None, max_tokens=100, json_schema=REPORT, grammar_from=start).collect()
            said = cut.text + rest.text
            if choice == "none":
                assert rest.status.finish_reason == "complete"
                check_report(said)
            else:
                assert "</tool_call>" in rest.text

    @pytest.mark.parametrize("choice", ["required", "get_weather"])
    def test_where_a_call_is_forced_a_format_is_without_effect(self, client: Client, choice: str) -> None:
        with client.session(tools=TOOLS) as session:
            answer = session.ask("How warm is it?", max_tokens=60, tool_choice=choice, json_schema=REPORT).collect()
            assert answer.tool_calls
            assert choice in ("required", answer.tool_calls[0].name)

    def test_a_format_is_all_there_is_where_no_tool_may_be_called(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            answer = session.ask("How warm is it?", max_tokens=60, tool_choice="none", json_schema=REPORT).collect()
            assert answer.status.finish_reason == "complete"
            check_report(answer.text)

    def test_a_session_without_tools_has_what_it_says_as_text(self, client: Client) -> None:
        with client.session() as session:
            answer = session.turn(
                "Say a call: ", max_tokens=100, choice=['<tool_call>{"name": "f"}</tool_call>']
            ).collect()
            assert answer.text == CALL
            assert answer.tool_calls == ()

    def test_a_branch_and_who_takes_the_session_up_read_calls_too(self, client: Client) -> None:
        with client.session(tools=TOOLS) as session:
            called_in(session)
            with session.fork() as branch:
                assert called_in(branch).name == "get_weather"
            with client.attach(session.token) as attached:
                assert called_in(attached).name == "get_weather"
