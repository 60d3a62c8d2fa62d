"""The unmodified OpenAI SDK speaks to a realtime session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import (
    ConversationItemAdded,
    ConversationItemTruncatedEvent,
    RealtimeErrorEvent,
    RealtimeServerEvent,
    ResponseDoneEvent,
    ResponseTextDeltaEvent,
    SessionCreatedEvent,
    SessionUpdatedEvent,
)

from microturn_client import Client, Tokens

TIMEOUT_S = 60
QUESTION = "What is the capital of France?"


@pytest.fixture
async def connection(openai: AsyncOpenAI) -> AsyncIterator[AsyncRealtimeConnection]:
    async with openai.realtime.connect(model="smollm2-135m") as connection:
        assert isinstance(await connection.recv(), SessionCreatedEvent)
        yield connection


async def until(connection: AsyncRealtimeConnection, kind: str) -> list[RealtimeServerEvent]:
    """The events up to the next one of this type."""
    events = []
    async with asyncio.timeout(TIMEOUT_S):
        while not events or events[-1].type != kind:
            events.append(await connection.recv())
    return events


async def say(connection: AsyncRealtimeConnection, text: str, role: str = "user") -> None:
    kind = "output_text" if role == "assistant" else "input_text"
    await connection.conversation.item.create(
        item={"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    )


async def answer(connection: AsyncRealtimeConnection, **options: Any) -> tuple[str, ResponseDoneEvent]:
    """Asks for an answer; returns its text as it came, and its end."""
    await connection.response.create(response=options)
    events = await until(connection, "response.done")
    deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
    done = events[-1]
    assert isinstance(done, ResponseDoneEvent)
    return "".join(deltas), done


def directly(server: str, *said: str, num_tokens: int) -> str:
    """What the server answers to these messages, greedily, after the last of them."""
    with Client(server) as client, client.session() as session:
        for text in said:
            session.append(text, role="user")
            events = list(session.turn(role="assistant", max_tokens=num_tokens))
        return "".join(event.text for event in events if isinstance(event, Tokens))


async def test_a_conversation_is_that_of_a_session(server: str, connection: AsyncRealtimeConnection) -> None:
    await say(connection, QUESTION)
    text, done = await answer(connection, max_output_tokens=8)
    assert text == await asyncio.to_thread(directly, server, QUESTION, num_tokens=8)
    assert done.response.output is not None
    assert done.response.output[0].content[0].text == text
    await say(connection, "And of Spain?")
    text, done = await answer(connection, max_output_tokens=8)
    assert text == await asyncio.to_thread(directly, server, QUESTION, "And of Spain?", num_tokens=8)
    usage = done.response.usage
    assert usage is not None
    assert usage.input_token_details is not None
    assert usage.input_tokens - 12 < usage.input_token_details.cached_tokens < usage.input_tokens
    assert usage.output_tokens == 8


async def test_what_an_agent_says_behind_an_answer_that_ended_is_of_its_message(
    openai: AsyncOpenAI, connection: AsyncRealtimeConnection
) -> None:
    """As another session is told it, which never generated the token that ended the answer."""
    await say(connection, QUESTION)
    first, done = await answer(connection, max_output_tokens=60)
    assert done.response.status == "completed"
    async with openai.realtime.connect(model="smollm2-135m") as told:
        await say(told, QUESTION)
        await say(told, first, "assistant")
        ends = []
        for session in (connection, told):
            await say(session, "Is there more?", "assistant")
            await say(session, "And of Italy?")
            text, done = await answer(session, max_output_tokens=20)
            assert done.response.usage is not None
            ends.append((text, done.response.usage.input_tokens))
    assert ends[0] == ends[1]


async def test_a_session_is_updated(connection: AsyncRealtimeConnection) -> None:
    await connection.session.update(session={"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 3})
    [updated] = await until(connection, "session.updated")
    assert isinstance(updated, SessionUpdatedEvent)
    assert updated.session.instructions == "Be brief."
    await say(connection, QUESTION)
    _, done = await answer(connection)
    assert done.response.usage.output_tokens == 3
    assert (done.response.status, done.response.status_details.reason) == ("incomplete", "max_output_tokens")


async def test_micro_turns_become_the_message_that_they_are(server: str, connection: AsyncRealtimeConnection) -> None:
    for start in range(0, len(QUESTION), 2):
        await connection.send({"type": "input_text_buffer.append", "text": QUESTION[start : start + 2]})
        await asyncio.sleep(0.05)
    await connection.send({"type": "input_text_buffer.commit"})
    events = await until(connection, "conversation.item.done")
    landed = [event for event in events if event.type == "input_text_buffer.appended"]
    assert "".join(event.text for event in landed) == QUESTION
    # Fifteen and one came every 50 ms and went every 200 ms, on a busy machine less evenly.
    assert 2 <= len(landed) <= 12
    assert all(event.microturn["kv"] == "in place" for event in landed)
    [added] = [event for event in events if isinstance(event, ConversationItemAdded)]
    assert added.item.content[0].text == QUESTION
    text, done = await answer(connection, max_output_tokens=8)
    assert text == await asyncio.to_thread(directly, server, QUESTION, num_tokens=8)
    # What the answer's turn had to add is the template's; all that was typed was there.
    usage = done.response.usage
    assert usage.input_tokens - usage.input_token_details.cached_tokens <= 10


async def test_token_ids_are_appended(server: str, tokenizer: Any, connection: AsyncRealtimeConnection) -> None:
    ids = tokenizer.encode(QUESTION, add_special_tokens=False)
    await connection.send({"type": "input_text_buffer.append", "token_ids": ids})
    text, _ = await answer(connection, max_output_tokens=8)
    assert text == await asyncio.to_thread(directly, server, QUESTION, num_tokens=8)


async def test_an_answer_is_cancelled_and_the_session_goes_on(connection: AsyncRealtimeConnection) -> None:
    await say(connection, "Tell me a very long story.")
    await connection.response.create(response={"max_output_tokens": 1000, "microturn": {"ignore_eos": True}})
    for _ in range(3):
        await until(connection, "response.output_text.delta")
    await connection.response.cancel()
    done = (await until(connection, "response.done"))[-1]
    assert (done.response.status, done.response.status_details.reason) == ("cancelled", "client_cancelled")
    assert 3 <= done.response.usage.output_tokens < 1000
    await say(connection, QUESTION)
    text, done = await answer(connection, max_output_tokens=5)
    assert text
    assert done.response.status == "incomplete"


async def test_an_answer_is_truncated_to_what_was_heard(connection: AsyncRealtimeConnection) -> None:
    await say(connection, "Count from one to twenty in words.")
    text, done = await answer(connection, max_output_tokens=30)
    item = done.response.output[0]
    # 1.5 seconds of speech are 22 characters.
    await connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=1500)
    truncated = (await until(connection, "conversation.item.truncated"))[-1]
    assert isinstance(truncated, ConversationItemTruncatedEvent)
    heard = truncated.text
    assert text.startswith(heard)
    assert 12 < len(heard) <= 22
    await connection.conversation.item.retrieve(item_id=item.id)
    retrieved = (await until(connection, "conversation.item.retrieved"))[-1]
    assert retrieved.item.content[0].text == heard
    # Only what was heard is there, token for token: the answer that goes on from it is the one that was cut.
    again, _ = await answer(connection, max_output_tokens=8)
    assert text.startswith(heard + again)


async def test_errors_name_the_event_that_caused_them(connection: AsyncRealtimeConnection) -> None:
    await connection.send({"type": "response.dance", "event_id": "mine"})
    [error] = await until(connection, "error")
    assert isinstance(error, RealtimeErrorEvent)
    assert (error.error.code, error.error.event_id) == ("unknown_event", "mine")
    await connection.response.cancel(event_id="again")
    [error] = await until(connection, "error")
    assert (error.error.code, error.error.event_id) == ("response_cancel_not_active", "again")


async def test_what_the_server_refuses_is_a_failed_response(connection: AsyncRealtimeConnection) -> None:
    await say(connection, QUESTION)
    _, done = await answer(connection, max_output_tokens=10_000_000)
    assert done.response.status == "failed"
    assert done.response.status_details.error.code == "context_full"
    _, done = await answer(connection, microturn={"temperature": -1})
    assert done.response.status_details.error.code == "invalid_argument"
    _, done = await answer(connection, max_output_tokens=2)
    assert done.response.usage.output_tokens == 2
