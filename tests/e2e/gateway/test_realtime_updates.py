"""A session as voice frameworks set it up, by the unmodified OpenAI SDK and checked against its types."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from openai.types.realtime import InputAudioBufferClearedEvent, SessionUpdatedEvent

# What the OpenAI Agents SDK sends for an agent that writes and has one tool.
SESSION: dict[str, Any] = {
    "type": "realtime",
    "model": "smollm2-135m",
    "instructions": "Be brief.",
    "output_modalities": ["text"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {"type": "semantic_vad", "interrupt_response": True},
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash"},
    },
    "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
}


async def test_a_session_is_set_up_with_its_tools(openai: AsyncOpenAI) -> None:
    async with openai.realtime.connect(model="smollm2-135m") as connection:
        await connection.recv()
        await connection.session.update(session={"type": "realtime", "tracing": "auto"})
        updated = await connection.recv()
        assert isinstance(updated, SessionUpdatedEvent)
        assert updated.session.tracing == "auto"

        await connection.session.update(session=SESSION)
        updated = SessionUpdatedEvent.model_validate((await connection.recv()).model_dump(exclude_unset=True))
        assert updated.session.instructions == "Be brief."
        assert updated.session.audio.output.voice == "ash"
        assert updated.session.audio.input.format.rate == 24000
        assert updated.session.audio.input.turn_detection is None
        assert updated.session.tool_choice == "auto"
        assert [tool.name for tool in updated.session.tools] == ["look"]

        await connection.input_audio_buffer.clear()
        assert isinstance(await connection.recv(), InputAudioBufferClearedEvent)
