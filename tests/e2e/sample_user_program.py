"""A program as a user would write it, with every public name; test_installed_client.py checks its types and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np

import microturn_client as mt
from microturn_client import (
    AppendOptions,
    AsyncClient,
    AsyncSession,
    AsyncTurn,
    Beat,
    Client,
    Event,
    GenerationOptions,
    Limits,
    MicroturnError,
    ModelInfo,
    Recovery,
    Resumed,
    Session,
    SessionId,
    SessionOptions,
    Status,
    Timing,
    Tokens,
    ToolArguments,
    ToolCall,
    ToolCallBegun,
    ToolEvent,
    Turn,
    TurnEnd,
    TurnInput,
    TurnOptions,
    Usage,
)
from microturn_client.testing import FakeServer


def told(event: Event) -> str:
    """What an event says: a type checker knows that there is no other kind."""
    if isinstance(event, Tokens):
        position: int = event.position
        logprobs: tuple[float, ...] | None = event.logprobs
        return f"{position}: {event.text} {event.ids} {logprobs}"
    if isinstance(event, Resumed):
        return f"{event.exact}: {event.reason}"
    if isinstance(event, ToolEvent):
        return told_call(event)
    return told_end(event)


def told_call(event: ToolCallBegun | ToolArguments | ToolCall) -> str:
    """What comes of a tool call."""
    match event:
        case ToolCallBegun():
            return f"{event.id} {event.name}"
        case ToolArguments():
            return event.json
        case ToolCall():
            return f"{event.name}({event.arguments})"


def told_end(end: TurnEnd) -> str:
    """How a turn ended, and what it took."""
    status: Status = end.status
    usage: Usage = status.usage
    timing: Timing = status.timing_ms
    numbers: list[int] = [usage.input_tokens, usage.output_tokens, usage.computed_tokens, usage.cached_tokens]
    total: float = timing.total
    return f"{status.finish_reason} {sum(numbers)} {total:.1f} {status.context_len}"


def error_of(error: MicroturnError) -> str:
    """Every error has a code, a sentence and, perhaps, a time after which to try again."""
    retry: int | None = error.retry_after_ms
    match error:
        case mt.ContextFull() | mt.InvalidArgument() | mt.FailedPrecondition():
            return f"mend it: {error.code} {error.message}"
        case mt.ResourceExhausted() | mt.Unavailable() | mt.DeadlineExceeded():
            return f"try again in {retry} ms"
        case mt.NotFound() | mt.Expired() | mt.PermissionDenied() | mt.InternalError():
            return f"open another: {dict(error.details)}"
        case _:
            return str(error)


KINDS: list[type[MicroturnError]] = [
    *(mt.SessionClosed, mt.ModelChanged, mt.TurnTimeout, mt.ConnectionLost, mt.ProtocolError),
]


def about(info: ModelInfo) -> str:
    """Which model it is, and what it allows."""
    limits: Limits = info.limits
    return f"{info.model_name} {info.model_fingerprint} {limits.max_context} {info.protocol_version}"


def talk(client: Client) -> list[str]:
    """The blocking client."""
    said = [about(client.model_info())]
    defaults: SessionOptions = {"temperature": 0.5, "seed": 1, "idle_timeout_s": 30.0}
    with client.session(timeout_s=10.0, **defaults) as session:
        inputs: list[TurnInput] = ["text", b"bytes", [1, 2], np.array([3, 4]), np.ones((2, 8), np.float32), None]
        append: AppendOptions = {"on_overlap": "queue"}
        for given in inputs:
            status: Status = session.append(given, **append)
        generation: GenerationOptions = {"max_tokens": 4, "stop": ["."]}
        session.turn(" or", **generation).wait()
        options: TurnOptions = {"max_tokens": 4, "deadline_ms": 1000.0}
        turn: Turn = session.turn(" and", timeout_s=5.0, **options)
        said += [told(event) for event in turn]
        status = session.interrupt(heard_tokens=2)
        branch: Session = session.fork()
        session.rewind(to=status.context_len - 1)
        session_id: SessionId = session.id
        said += [f"{session_id} {branch.context_len - session.context_len} {session.seed}"]
        branch.close()
        for event in session.stream(words(), every_ms=1.0, max_tokens=1):
            if isinstance(event, Beat):
                said.append(f"{event.num_chunks > 0} {event.is_held_up} {event.late_ms >= 0}")
            else:
                said.append(told(event))
        with client.attach(session.token) as again:  # from here on the session is this one's
            again.turn(max_tokens=1).wait()
    try:
        session.append("too late")
    except MicroturnError as error:
        said.append(error_of(error))
    return said


def words() -> Iterator[str]:
    """A source."""
    yield from ("so", " the", " first")


async def heard() -> AsyncIterator[str]:
    """The same, as it comes."""
    for word in words():
        yield word
        await asyncio.sleep(0.001)


async def talk_async(client: AsyncClient) -> list[str]:
    """The client for asyncio."""
    said = [about(await client.model_info())]
    session: AsyncSession
    async with client.session(overflow="error") as session:
        status: Status = await session.append("Once")
        turn: AsyncTurn = session.turn(" upon", max_tokens=3)
        said += [told(event) async for event in turn]
        await session.interrupt(heard_chars=1)
        await session.rewind(to=status.context_len)
        branch = await session.fork()
        await branch.close()
        happenings = session.stream(heard(), every_ms=1.0, max_tokens=1)
        said += ["beat" if isinstance(event, Beat) else told(event) async for event in happenings]
        turn = session.turn(None, max_tokens=2)
        turn.close()
        end = await session.close()
        said.append("not confirmed" if end is None else end.finish_reason)
    return said


def main() -> None:
    """Against a server without a model."""
    server = FakeServer(token_s=0.0, max_context=512, idle_timeout_s=30.0)
    with server.client(recovery=Recovery(give_up_after_s=5.0)) as client:
        said = talk(client)
    server.break_streams()
    server.restart()

    async def run() -> list[str]:
        async with server.async_client(recovery=None) as client:
            return await talk_async(client)

    said += asyncio.run(run())
    assert [kind.__name__ for kind in KINDS] == [
        "SessionClosed",
        "ModelChanged",
        "TurnTimeout",
        "ConnectionLost",
        "ProtocolError",
    ]
    print("\n".join(said))


if __name__ == "__main__":
    main()
