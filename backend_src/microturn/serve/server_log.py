"""Triton's log: where it goes, and which of its lines explains a failed start.

While the server starts and stops, Triton's own lines are hidden: they report missing GPUs and count down timeouts.
Lines of the model process are always shown, on a terminal as text (see `log_text`).
"""

from __future__ import annotations

import collections
import io
import re
import threading
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.serve.log_text import as_text

_NUM_KEPT_LINES = 500

# "E1121 11:51:39.635 5466 model_lifecycle.cc:642] …", and the few lines that Triton writes without a head.
_SERVER_LINE = re.compile(
    r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\]|error: |Signal \(\d+\) received|\[libprotobuf |\S+/tritonserver: "
)
# Lines below these are the server's too: the frames of a traceback, and the help after a wrong option, to its end.
_SERVER_BLOCKS = {"At:": re.compile(r" {2}"), "Usage: tritonserver [options]": re.compile("")}

# The most specific first.
_REASONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"failed to load '[^']*' version \d+: [\w ]+: (.+)",
        r"Failed to preinitialize Python stub: (.+)",
        r"failed to start \w+ service: [\w ]+ - (.+)",
        r"Poll failed for model directory '[^']*': (.+)",
        r"(unrecognized option .+|Invalid option value.+|invalid value for .+)",
        r"(error while loading shared libraries: .+)",
        r"^E\d{4} [^\]]+\] (.+)",
        r"^error: (.+)",
    )
)

MODEL_DIED = "the model process died while it loaded the model (out of memory?)"
_NO_REASON = re.compile(
    rf"|{re.escape(MODEL_DIED)}|it ended with code \d+"
    r"|.*(boost::interprocess::lock_exception|CudaDriverHelper|Stub process '[^']*' is not healthy).*"
)


class ServerLog:
    """Reads the output of the server, and of the next one after a restart.

    Args:
        log_dir: the whole log is appended to ``triton.log`` there, as it comes; None passes it to stderr, and so goes
            what cannot be written.
        is_text: whether the model's JSON lines are formatted as text on stderr.

    Raises:
        ServeError: the file cannot be written.
    """

    def __init__(self, log_dir: Path | None, *, is_text: bool = False) -> None:
        self._file: FileIO | None = None
        self._is_failing = False
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_KEPT_LINES)
        self._is_text = is_text
        self._shows_server_lines = False
        self._block: re.Pattern[str] | None = None
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                self._file = (log_dir / "triton.log").open("ab", buffering=0)
            except OSError as error:
                raise ServeError(f"cannot write a log: {error.strerror}: {error.filename}") from error

    def follow(self, output: IO[bytes]) -> threading.Thread:
        """Starts a thread that reads a new server's output to its end; lines of the previous one are forgotten."""
        self._lines.clear()
        self._block = None
        self._shows_server_lines = False
        reader = threading.Thread(target=self._read, args=(output,), name="triton-log", daemon=True)
        reader.start()
        return reader

    def show_server_lines(self, shown: bool) -> None:
        """Shows or hides Triton's own lines from now on."""
        self._shows_server_lines = shown

    def failure(self) -> str:
        """The reason that the log gives, else its last line, else an empty string."""
        return find_reason(tuple(self._lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, output: IO[bytes]) -> None:
        with io.TextIOWrapper(output, errors="replace") as text:
            for raw_line in text:
                line = raw_line.rstrip()
                if line:
                    self._lines.append(line)
                    self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        if self._file is not None and self._has_written(self._file, line):
            return
        if self._shows_server_lines or not self._is_server_line(line):
            console.write_stderr(as_text(line) if self._is_text else line)

    def _has_written(self, file: FileIO, line: str) -> bool:
        # Whoever reads no more ends the server with its next line.
        try:
            file.write(f"{line}\n".encode(errors="replace"))
        except OSError as error:
            if not self._is_failing:
                console.say(f"the log goes to stderr while it cannot be written: {error.strerror}: {file.name!s}")
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def _is_server_line(self, line: str) -> bool:
        if line in _SERVER_BLOCKS:
            self._block = _SERVER_BLOCKS[line]
        elif self._block is None or not self._block.match(line):
            self._block = None
            return _SERVER_LINE.match(line) is not None
        return True


def find_reason(lines: Iterable[str]) -> str:
    """Picks the line that explains a failed start, without its head and its traceback."""
    newest_first = list(lines)[::-1]
    for reason in _REASONS:
        for line in newest_first:
            found = reason.search(line)
            if found:
                return _tidy(found.group(1))
    return newest_first[0] if newest_first else ""


def says_why(reason: str) -> bool:
    """Whether a reason is an error message, which the next start would meet too. A process that died leaves none."""
    return _NO_REASON.fullmatch(reason) is None


def _tidy(text: str) -> str:
    # Triton escapes line ends; what follows the first is the traceback.
    text = text.split("\\n", 1)[0].strip().removesuffix('"').strip()
    if re.fullmatch(r"Stub process '[^']*' is not healthy\.", text):
        return MODEL_DIED
    return text.removeprefix('"')
