"""A realtime session without end, as the unmodified OpenAI SDK has it."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from microturn_client import Client, Tokens

WINDOW = {"overflow": "window", "window_tokens": 128, "sink_tokens": 16}
QUESTIONS = [f"What is {number} and {number + 1}? Say the number and nothing else." for number in range(24)]
NUM_TOKENS = 6


def directly(server: str) -> list[str]:
    """What a session of this window answers to the questions, greedily."""
    texts = []
    with Client(server) as client, client.session(**WINDOW) as session:
        for question in QUESTIONS:
            session.append(question, role="user")
            events = session.turn(role="assistant", max_tokens=NUM_TOKENS)
            texts.append("".join(event.text for event in events if isinstance(event, Tokens)))
    return texts


async def until(connection: AsyncRealtimeConnection, kind: str) -> Any:
    async with asyncio.timeout(60):
        while (event := await connection.recv()).type != kind:
            assert event.type != "error", event
    return event


async def test_a_session_goes_on_behind_its_window(server: str, openai: AsyncOpenAI) -> None:
    texts = await asyncio.to_thread(directly, server)
    async with openai.realtime.connect(model="smollm2-135m") as connection:
        session: Any = {"type": "realtime", "max_output_tokens": NUM_TOKENS, "microturn": WINDOW}
        await connection.session.update(session=session)
        updated = await until(connection, "session.updated")
        assert updated.session.microturn.items() >= WINDOW.items()
        for number, (question, text) in enumerate(zip(QUESTIONS, texts, strict=True)):
            content: Any = [{"type": "input_text", "text": question}]
            await connection.conversation.item.create(
                item={"id": f"question_{number}", "type": "message", "role": "user", "content": content}
            )
            await connection.response.create()
            done = await until(connection, "response.done")
            assert done.response.output[0].content[0].text == text
        assert done.response.microturn["kept_len"] < done.response.microturn["context_len"] - 100
        await connection.conversation.item.retrieve(item_id="question_0")
        async with asyncio.timeout(60):
            assert (await connection.recv()).error.code == "item_not_found"
        await connection.conversation.item.delete(item_id=f"question_{len(QUESTIONS) - 1}")
        await until(connection, "conversation.item.deleted")
        await connection.response.create()
        assert (await until(connection, "response.done")).response.output
