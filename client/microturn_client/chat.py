"""``microturn-chat``, or ``microturn chat``: talk with a server from a terminal.

Every 200 ms the new characters go to the server as a micro-turn, so when Enter asks for the answer, little is left to
be read. Ctrl-C talks over an answer: it is cut where it has been shown. Ctrl-C with no answer, or Ctrl-D, ends.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from microturn_client._aio import AsyncClient
from microturn_client._aio_session import AsyncSession
from microturn_client._errors import MicroturnError
from microturn_client._events import Resumed, Tokens
from microturn_client._options import TurnOptions

BEAT_S = 0.2
_ENTER, _END, _BACKSPACES = "\n", "\x04", ("\x7f", "\b")


class Chat:
    """One conversation.

    Args:
        session: it is held in.
        write: shows text.
        options: of each answer.
        has_roles: messages have roles, by the model's chat template.
        measures: tells how long things took.
    """

    def __init__(
        self,
        session: AsyncSession,
        write: Callable[[str], object],
        *,
        max_tokens: int,
        temperature: float,
        has_roles: bool = True,
        measures: bool = False,
    ) -> None:
        self._session = session
        self._write = write
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._has_roles = has_roles
        self._measures = measures
        self._unsent = ""
        self._append_ms: list[float] = []
        self._answer: asyncio.Task[None] | None = None

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being shown."""
        return self._answer is not None and not self._answer.done()

    def type(self, text: str) -> None:
        """Takes characters that were typed; a backspace takes back one that has not been sent."""
        for char in text:
            if char not in _BACKSPACES:
                self._unsent += char
                self._write(char)
            elif self._unsent:
                self._unsent = self._unsent[:-1]
                self._write("\b \b")

    async def beat(self) -> None:
        """Sends what was typed since the last beat."""
        if not self._unsent:
            return
        text, self._unsent = self._unsent, ""
        began_s = time.perf_counter()
        if self._has_roles:
            await self._session.append(text, role="user")
        else:
            await self._session.append(text)
        self._append_ms.append((time.perf_counter() - began_s) * 1e3)

    async def ask(self) -> None:
        """Shows the answer to what was typed, until it ends or is talked over."""
        self._write("\n")
        self._answer = asyncio.ensure_future(self._show_answer())
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer
        self._write("\n")

    def talk_over(self) -> bool:
        """Ends the answer where it has been shown; False when there is none."""
        if self._answer is None or self._answer.done():
            return False
        return self._answer.cancel()

    async def _show_answer(self) -> None:
        began_s = time.perf_counter()
        first_ms: float | None = None
        num_tokens = 0
        await self.beat()
        options: TurnOptions = {"max_tokens": self._max_tokens, "temperature": self._temperature}
        if self._has_roles:
            options["role"] = "assistant"
        turn = self._session.turn(None, **options)
        try:
            async for event in turn:
                if isinstance(event, Tokens):
                    first_ms = (time.perf_counter() - began_s) * 1e3 if first_ms is None else first_ms
                    num_tokens += len(event.ids)
                    self._write(event.text)
                elif isinstance(event, Resumed):
                    self._write(f"\n[{event.reason}]\n")
        finally:
            turn.close()
            if self._measures:
                self._write(_measured(first_ms, num_tokens, time.perf_counter() - began_s, self._append_ms))
            self._append_ms = []


def _measured(first_ms: float | None, num_tokens: int, took_s: float, append_ms: Sequence[float]) -> str:
    said = f"\n[first token after {first_ms:.0f} ms, " if first_ms is not None else "\n[no token, "
    said += f"{num_tokens} tokens in {took_s:.2f} s"
    if append_ms:
        mean_ms = sum(append_ms) / len(append_ms)
        plural = "s" if len(append_ms) > 1 else ""
        said += f"; {len(append_ms)} micro-turn{plural} of {mean_ms:.0f} ms, at most {max(append_ms):.0f}"
    return said + "]"


async def converse(chat: Chat, typed: AsyncIterator[str]) -> None:
    """Passes on what is typed, on the beat, until it ends.

    Raises:
        MicroturnError: when the server is lost.
    """
    beat_at = time.monotonic()
    async for text in typed:
        for char in text:
            if char == _END:
                return
            if char == _ENTER:
                await chat.ask()
            else:
                chat.type(char)
        if time.monotonic() >= beat_at:
            await chat.beat()
            beat_at = time.monotonic() + BEAT_S


async def keys(descriptor: int) -> AsyncIterator[str]:
    """What is typed, as it comes; an empty text on each beat on which nothing was."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # the terminal is gone
            data = b""
        if not data:
            loop.remove_reader(descriptor)
        arrived.put_nowait(data)

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        loop.add_reader(descriptor, read)
    except PermissionError:  # a file: it is all there
        while data := os.read(descriptor, 4096):
            yield decoder.decode(data)
        return
    try:
        while True:
            try:
                data = await asyncio.wait_for(arrived.get(), BEAT_S)
            except TimeoutError:
                yield ""
                continue
            if not data:
                return
            yield decoder.decode(data)
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def _unbuffered(descriptor: int) -> Iterator[None]:
    """Characters come as they are typed, and are not shown by the terminal itself."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _show(text: str) -> None:
    print(text, end="", flush=True)


async def _run(arguments: argparse.Namespace) -> None:
    async with AsyncClient(arguments.address) as client, client.session() as session:
        chat = Chat(
            session,
            _show,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            has_roles=not arguments.plain,
            measures=arguments.measure,
        )
        task = asyncio.current_task()
        assert task is not None

        def interrupted() -> None:
            if not chat.talk_over():
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)
        await converse(chat, keys(sys.stdin.fileno()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="microturn-chat", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("address", nargs="?", default="localhost:8001", help="of the server (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--plain", action="store_true", help="no roles: for models without a chat template")
    parser.add_argument("--measure", action="store_true", help="tell how long things took")
    arguments = parser.parse_args(argv)
    is_terminal = sys.stdin.isatty()
    try:
        with _unbuffered(sys.stdin.fileno()) if is_terminal else contextlib.nullcontext():
            asyncio.run(_run(arguments))
    except MicroturnError as error:
        print(f"\nmicroturn-chat: {error.code}: {error}", file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
