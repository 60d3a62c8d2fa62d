import asyncio
import os
import pty
import re
import subprocess
import sys

import pytest

from microturn_client.chat import Chat, converse, keys, main
from microturn_client.testing import FakeServer


@pytest.fixture
def server():
    return FakeServer(token_s=0.002)


async def as_typed(*texts):
    for text in texts:
        yield text


async def test_what_is_typed_is_there_when_the_answer_is_asked_for(server):
    shown = []
    async with server.async_client() as client, client.session() as session:
        chat = Chat(session, shown.append, max_tokens=8, temperature=0.0, measures=True)
        await converse(chat, as_typed("so the f", "irst\x7ft thing", "\n", "\x04", "never"))
        context = server.context_of(session.id)
    assert bytes(context[:-8]) == b"so the first thing"
    said = "".join(shown)
    assert bytes(context[-8:]).decode() in said
    assert "never" not in said
    counted = re.search(r"\[first token after \d+ ms, 8 tokens in [\d.]+ s; (\d+ micro-turns?) of \d+ ms", said)
    assert counted is not None
    assert counted[1].endswith("s") == (counted[1] != "1 micro-turn")


async def test_an_answer_that_is_talked_over_is_cut_where_it_was_shown(server):
    shown = []
    async with server.async_client() as client, client.session() as session:
        chat = None

        def show(text):
            shown.append(text)
            if len(shown) == 10:
                assert chat.is_answering
                chat.talk_over()

        chat = Chat(session, show, max_tokens=1000, temperature=0.0, has_roles=False)
        await converse(chat, as_typed("ab", "\n"))
        assert not chat.is_answering
        assert not chat.talk_over()
        await session.append([])
        answer = bytes(server.context_of(session.id)[2:]).decode()
    assert 0 < len(answer) < 20
    assert answer in "".join(shown)


async def test_keys_come_as_they_are_typed():
    reading, writing = os.pipe()
    os.write(writing, "é".encode()[:1])
    typed = keys(reading)
    assert await anext(typed) == ""
    os.write(writing, "é".encode()[1:])
    assert await anext(typed) == "é"
    os.close(writing)
    assert [text async for text in typed] == []
    os.close(reading)


async def test_keys_come_from_a_file_too(tmp_path):
    """No event loop waits for a file: what was to be typed was lost with a PermissionError."""
    (tmp_path / "typed").write_text("Grüße\n" * 1000)
    with (tmp_path / "typed").open() as file:
        assert "".join([text async for text in keys(file.fileno())]) == "Grüße\n" * 1000


async def test_a_terminal_that_is_gone_is_the_end():
    terminal, reading = pty.openpty()
    typed = keys(reading)
    os.write(terminal, b"a\n")
    assert await anext(typed) == "a\n"
    os.close(terminal)
    async with asyncio.timeout(30):
        assert [text async for text in typed if text] == []
    os.close(reading)


def test_the_command_says_what_it_can_and_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--measure" in capsys.readouterr().out
    program = "import sys; from microturn_client.chat import main; sys.exit(main(['127.0.0.1:1']))"
    done = subprocess.run([sys.executable, "-c", program], input="a\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "microturn-chat: UNAVAILABLE" in done.stderr
