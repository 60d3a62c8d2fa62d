"""The unmodified OpenAI SDK asks for responses over a WebSocket, of a gateway before a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses.responses_server_event import ResponsesServerEvent, ResponseWsCreated
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from microturn_client.testing import FakeServer
from microturn_gateway import app, response_socket
from support.gateway import running_gateway
from support.realtime_socket import connected, received

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
TOKEN = "a-token-for-these-tests"
QUESTION = "What should I plant in a small garden?"
LASTS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> FakeServer:
    return FakeServer(token_s=getattr(request, "param", 0.0))


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def gateway(server: FakeServer, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())
    with running_gateway("a fake one", token=TOKEN, **{"max_sessions": 4, **settings}) as address:
        yield address


@pytest.fixture
async def openai(gateway: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key=TOKEN, base_url=f"http://{gateway}/v1", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def connection(openai: AsyncOpenAI) -> AsyncIterator[AsyncResponsesConnection]:
    async with openai.responses.connect() as connection:
        yield connection


async def events_of(connection: AsyncResponsesConnection, said: Any = QUESTION, **options: Any) -> list[Any]:
    await connection.response.create(model="fake", input=said, **{"max_output_tokens": 6, **options})
    return await rest_of(connection)


async def rest_of(connection: AsyncResponsesConnection) -> list[Any]:
    events = [await connection.recv()]
    while events[-1].type not in LASTS:
        events.append(await connection.recv())
    return events


async def ask(connection: AsyncResponsesConnection, said: Any = QUESTION, previous: Any = None, **options: Any) -> Any:
    """A response, or an error."""
    if previous is not None:
        options["previous_response_id"] = previous.id
    last = (await events_of(connection, said, **options))[-1]
    return last.error if last.type == "error" else last.response


def cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def raw_socket(address: str, **options: Any) -> AbstractAsyncContextManager[ClientConnection]:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    return connected(address, "/v1/responses", **{"additional_headers": bearer, **options})


async def is_refused(address: str) -> bool:
    """Whether there is no place for a connection; then it is said when to ask again."""
    try:
        async with raw_socket(address):
            return False
    except InvalidStatus as refused:
        response = refused.response
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    return True


async def last_words(socket: ClientConnection) -> tuple[str, int, str]:
    """The code of the last error, and what the connection is closed with."""
    code = ""
    with contextlib.suppress(ConnectionClosedError):
        async for text in socket:
            event = json.loads(text)
            code = event["error"]["code"] if event["type"] == "error" else code
    assert socket.close_code is not None
    return code, socket.close_code, socket.close_reason or ""


async def test_events_are_those_of_the_stream(openai: AsyncOpenAI, connection: AsyncResponsesConnection) -> None:
    events = await events_of(connection)
    for event in events:
        _EVENT.validate_python(event.to_dict(), strict=True)
    stream = await openai.responses.create(model="fake", input=QUESTION, max_output_tokens=6, stream=True)
    streamed = [event async for event in stream]
    assert [event.type for event in events] == [event.type for event in streamed]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[0].content == streamed[-1].response.output[0].content


async def test_a_response_that_is_not_stored_is_gone_on_from_on_its_connection_alone(
    openai: AsyncOpenAI, connection: AsyncResponsesConnection
) -> None:
    first = await ask(connection, store=False)
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.retrieve(first.id)
    async with openai.responses.connect() as other:
        assert (await ask(other, "Go on.", first)).code == "previous_response_not_found"
        assert cached(await ask(other)) == 0
    second = await ask(connection, "And in the shade?", first, store=False)
    assert cached(second) >= first.usage.total_tokens - 2
    assert (await ask(connection, "Again.", first, store=False)).code == "previous_response_not_found"
    third = await ask(connection, "Why?", second, store=False)
    assert cached(third) >= second.usage.total_tokens - 2
    named = {"type": "item_reference", "id": third.output[0].id}
    assert (await ask(connection, [named], store=False)).status == "incomplete"
    assert (await ask(connection, [named], store=False)).code == "item_not_found"


async def test_one_that_is_stored_is_gone_on_from_anywhere(
    openai: AsyncOpenAI, connection: AsyncResponsesConnection
) -> None:
    first = await ask(connection)
    await ask(connection, "Something else.")
    second = await ask(connection, "And in the shade?", first)
    assert cached(second) >= first.usage.total_tokens - 2
    over_http = await openai.responses.create(model="fake", input="Why?", previous_response_id=second.id)
    assert cached(over_http) >= second.usage.total_tokens - 2


async def test_one_whose_successor_failed_is_given_up_unless_it_is_stored(connection: AsyncResponsesConnection) -> None:
    wrong = [{"type": "function_call_output", "call_id": "call_unknown", "output": "1"}]
    for options in ({}, {"max_output_tokens": 0}):
        first = await ask(connection, store=False)
        assert (await ask(connection, wrong, first, store=False, **options)).code == "invalid_value"
        assert (await ask(connection, "And now?", first, store=False)).code == "previous_response_not_found"
    stored = await ask(connection)
    assert (await ask(connection, wrong, stored)).param == "input"
    assert cached(await ask(connection, "And now?", stored)) >= stored.usage.total_tokens - 2


async def test_what_is_prepared_is_not_computed_again(connection: AsyncResponsesConnection) -> None:
    said = [{"role": "user", "content": QUESTION}]
    warm = await ask(connection, said, instructions="Be brief.", generate=False, store=False)
    assert (warm.status, warm.output, warm.usage.output_tokens, warm.max_output_tokens) == ("completed", [], 0, 6)
    answer = await ask(connection, [], warm, instructions="Be brief.", store=False)
    assert cached(answer) == warm.usage.input_tokens > 0
    cold = await ask(connection, said, instructions="Be brief.")
    assert answer.output[0].content == cold.output[0].content
    assert answer.usage.input_tokens == cold.usage.input_tokens


async def test_instructions_and_tools_can_be_prepared_before_anything_is_said(
    connection: AsyncResponsesConnection,
) -> None:
    warm = await ask(connection, [], instructions="Be brief.", generate=False)
    answer = await ask(connection, QUESTION, warm, instructions="Be brief.")
    assert cached(answer) == warm.usage.input_tokens > 0
    nothing = await ask(connection, [], generate=False)
    assert (nothing.status, nothing.usage.input_tokens) == ("completed", 0)
    assert (await ask(connection, QUESTION, nothing)).output[0].content


async def test_the_sessions_of_a_connection_end_with_it(server: FakeServer, openai: AsyncOpenAI) -> None:
    async with openai.responses.connect() as connection:
        stored = await ask(connection)
        first = await ask(connection, "Something else.", store=False)
        await ask(connection, "And in the shade?", first, store=False)
        assert server.num_sessions == 2
    async with asyncio.timeout(10):
        while server.num_sessions > 1:
            await asyncio.sleep(0.01)
    async with openai.responses.connect() as connection:
        assert cached(await ask(connection, "And now?", stored)) >= stored.usage.total_tokens - 2


async def test_one_response_is_made_at_a_time(connection: AsyncResponsesConnection) -> None:
    for text in ("One", "Two", "Three"):
        await connection.response.create(model="fake", input=text, max_output_tokens=4)
    told = [await rest_of(connection) for _ in range(3)]
    assert [len({event.response.id for event in events if hasattr(event, "response")}) for events in told] == [1, 1, 1]
    assert len({events[-1].response.id for events in told}) == 3


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_closing_interrupts_and_what_was_said_stays(openai: AsyncOpenAI) -> None:
    async with openai.responses.connect() as connection:
        await connection.response.create(model="fake", input=QUESTION, max_output_tokens=2000)
        created = await connection.recv()
        assert isinstance(created, ResponseWsCreated)
        while (await connection.recv()).type != "response.output_text.delta":
            pass
    async with asyncio.timeout(10):
        while True:
            try:
                response = await openai.responses.retrieve(created.response.id)
                break
            except sdk.NotFoundError:
                await asyncio.sleep(0.01)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "interrupted"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens < 2000


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("[]", "invalid_json", None),
        ("{}", "unknown_event", "type"),
        ('{"type": "response.steer"}', "unknown_event", "type"),
        ('{"type": "response.create"}', "missing_parameter", "input"),
        ('{"type": "response.create", "input": "a", "stream_id": "b"}', "unsupported_parameter", "stream_id"),
        ('{"type": "response.create", "input": "a", "background": true}', "unsupported_parameter", "background"),
        ('{"type": "response.create", "input": "a", "model": "gpt-8"}', "model_not_found", "model"),
    ],
)
async def test_what_is_not_here_is_refused_and_the_connection_goes_on(
    gateway: str, text: str, code: str, param: str | None
) -> None:
    async with raw_socket(gateway) as socket:
        for _ in range(2):
            await socket.send(text)
            event = await received(socket)
            assert (event["type"], event["error"]["code"], event["error"]["param"]) == ("error", code, param)
            assert event["status"] == (404 if code == "model_not_found" else 400)


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_who_asks_for_too_much_at_once_is_disconnected(gateway: str) -> None:
    async with raw_socket(gateway) as socket:
        for _ in range(40):
            await socket.send('{"type": "response.create", "input": "a", "max_output_tokens": 2000}')
        assert await last_words(socket) == ("too_many_events", 1008, "too_many_events")


@pytest.mark.parametrize("settings", [{"idle_timeout_s": 0.2}])
async def test_who_says_nothing_is_disconnected(gateway: str) -> None:
    async with raw_socket(gateway) as socket:
        assert await last_words(socket) == ("session_idle", 1000, "session_idle")


@pytest.mark.parametrize("server", [0.005], indirect=True)
@pytest.mark.parametrize("num_asked", [0, 3])
async def test_a_connection_does_not_last_for_ever(
    gateway: str, monkeypatch: pytest.MonkeyPatch, num_asked: int
) -> None:
    """Not even one that always has something to do: what has begun is told to its end, and no more."""
    monkeypatch.setattr(response_socket, "_MAX_AGE_S", 0.2)
    async with raw_socket(gateway) as socket:
        for _ in range(num_asked):
            await socket.send('{"type": "response.create", "input": "a", "max_output_tokens": 100}')
        told = [json.loads(text) async for text in socket]
        assert [event["type"] for event in told].count("response.incomplete") <= 1
        code = "websocket_connection_limit_reached"
        assert (told[-1]["error"]["code"], socket.close_code, socket.close_reason) == (code, 1000, code)


@pytest.mark.parametrize("settings", [{"max_sessions": 1, "send_timeout_s": 0.3}])
async def test_who_does_not_read_makes_way(gateway: str) -> None:
    event = {"type": "response.create", "input": "a", "max_output_tokens": 4, "metadata": {"long": "x" * 200_000}}
    async with raw_socket(gateway, max_queue=1, compression=None) as socket:
        for _ in range(15):  # 9 MB of responses, which no buffer has room for
            await socket.send(json.dumps(event))
        async with asyncio.timeout(20):
            while await is_refused(gateway):
                await asyncio.sleep(0.05)
        socket.transport.abort()


@pytest.mark.parametrize("settings", [{"max_sessions": 1}])
async def test_access_is_that_of_realtime_sessions(gateway: str, openai: AsyncOpenAI) -> None:
    secret = (await openai.realtime.client_secrets.create()).value
    for key in ("wrong", secret):  # a secret is for realtime sessions
        with pytest.raises(InvalidStatus) as refused:
            async with raw_socket(gateway, additional_headers={"authorization": f"Bearer {key}"}):
                pass
        assert refused.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        async with raw_socket(gateway, origin="https://evil.example"):
            pass
    assert refused.value.response.status_code == 403
    offered = ["realtime", f"openai-insecure-api-key.{TOKEN}"]
    async with raw_socket(gateway, additional_headers={}, subprotocols=offered) as socket:
        assert socket.subprotocol == "realtime"
        with pytest.raises(InvalidStatus) as refused:
            async with raw_socket(gateway):
                pass
        assert refused.value.response.status_code == 429
