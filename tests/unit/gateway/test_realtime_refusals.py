"""What a realtime client is told when something is wrong, and that it changes nothing."""

from __future__ import annotations

import pytest

from microturn_gateway.failures import Refusal
from support.realtime_driver import Driver, error_of, types


def test_a_turn_that_fails_undoes_what_was_asked_for(driver: Driver) -> None:
    driver.item("one", item_id="one")
    driver.run()
    driver.item("two", item_id="two")
    driver.begin()
    driver.realtime.failed(Refusal("context_full", "no room"))
    driver.send("conversation.item.retrieve", item_id="two")
    events = driver.run()
    assert [event["error"]["code"] for event in events] == ["context_full", "item_not_found"]
    driver.item("three")
    driver.run()
    assert driver.server.text == "<user>one\nthree"


def test_a_response_that_fails_says_so_itself(driver: Driver) -> None:
    driver.item("one")
    driver.send("response.create")
    driver.answer(driver.begin())
    driver.begin()
    driver.realtime.failed(Refusal("resource_exhausted", "full", http_status=429))
    done = driver.run()[-1]["response"]
    assert done["status"] == "failed"
    assert done["status_details"]["error"]["code"] == "resource_exhausted"
    assert done["status_details"]["error"]["type"] == "rate_limit_error"


def test_what_waits_is_bounded(driver: Driver) -> None:
    driver.item("first")
    driver.begin()
    while not driver.realtime.is_full:
        driver.send("session.update", session={"instructions": "x" * 500_000})
        driver.item("x" * 500_000)
    assert "error" not in types(driver.taken())
    assert len(driver.realtime._jobs) == 5  # each holds its instructions, too
    driver.item("more")
    assert error_of(driver.taken())["code"] == "too_many_events"
    driver.run()
    assert not driver.realtime.is_full
    driver = Driver()
    driver.send("input_text_buffer.append", text="x")
    driver.begin()
    for _ in range(2):
        driver.send("input_text_buffer.append", text="x" * 40_000)
    assert error_of(driver.taken())["code"] == "buffer_full"


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[" * 100_000, "invalid_json", None),
        ("[]", "invalid_json", None),
        ("{}", "missing_parameter", "type"),
        ('{"type": 1}', "invalid_type", "type"),
        ('{"type": "input_text_buffer.append", "text": "\\ud800"}', "invalid_json", None),
        ('{"type": "input_text_buffer.append", "token_ids": [2147483648]}', "invalid_type", "token_ids"),
        (
            '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}}',
            "missing_parameter",
            "item.content",
        ),
        ('{"type": "response.think"}', "unknown_event", "type"),
        ('{"type": "input_text_buffer.append"}', "missing_parameter", "text"),
        ('{"type": "input_text_buffer.append", "token_ids": ["a"]}', "invalid_type", "token_ids"),
        ('{"type": "input_text_buffer.append", "token_ids": [true]}', "invalid_type", "token_ids"),
        ('{"type": "response.create", "response": {"microturn": {"temperature": NaN}}}', "invalid_json", None),
        ('{"type": "response.create", "response": {"microturn": {"temperature": 1e999}}}', "invalid_json", None),
        ('{"type": "input_text_buffer.append", "text": "a", "audio": "b"}', "unsupported_parameter", "audio"),
        ('{"type": "session.update", "session": {"tools": [{}]}}', "unsupported_parameter", "session.tools"),
        (
            '{"type": "session.update", "session": {"output_modalities": ["audio"]}}',
            "unsupported_parameter",
            "session.output_modalities",
        ),
        (
            '{"type": "response.create", "response": {"max_output_tokens": 0}}',
            "invalid_value",
            "response.max_output_tokens",
        ),
        (
            '{"type": "response.create", "response": {"microturn": {"heat": 1}}}',
            "unsupported_parameter",
            "response.microturn.heat",
        ),
        (
            '{"type": "conversation.item.create", "item": {"type": "mcp_call"}}',
            "unsupported_parameter",
            "item.type",
        ),
    ],
)
def test_a_message_that_is_wrong_changes_nothing(driver: Driver, text: str, code: str, param: str | None) -> None:
    driver.realtime.receive(text)
    error = error_of(driver.run())
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert driver.steps == []
