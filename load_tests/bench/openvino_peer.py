"""OpenVINO GenAI as a peer: continuous batching and prefix caching, weights in Q8_0, its KV in 8 bits (the default).

It runs in a process of its own, with an environment of its own in the cache directory, made on first use. Requests go
through a pipe: a server would only cost it time. (This file is not called `openvino`, which the program beside it
imports: a program's directory comes first in its path.)
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Thread

from load_tests.bench.talks import HistoryTalk
from microturn.zoo.cache import default_cache_dir
from microturn.zoo.embedded_models import EMBEDDED_MODELS, fetch_gguf

PACKAGES = ("openvino-genai==2026.4.1", "gguf==0.19.0")
_PROGRAM = Path(__file__).with_name("openvino_program.py")

_Answers = dict[int, tuple[asyncio.AbstractEventLoop, "asyncio.Future[list[int]]"]]


@contextmanager
def openvino(model: str) -> Iterator[OpenVino]:
    """Runs an embedded model until the block ends.

    Raises:
        RuntimeError: the model is not an embedded one, or the program ends before it is ready.
    """
    if model not in EMBEDDED_MODELS:
        raise RuntimeError(f"OpenVINO runs what is embedded as GGUF ({', '.join(EMBEDDED_MODELS)}), not {model}")
    home = default_cache_dir() / "peers" / "openvino"
    directory = home / model
    with tempfile.TemporaryDirectory() as work_dir:
        is_converted = (directory / ".ready").exists()
        gguf = Path() if is_converted else fetch_gguf(EMBEDDED_MODELS[model], Path(work_dir))
        command = [str(_python(home)), str(_PROGRAM), str(gguf), str(directory)]
        environment = {**os.environ, "PYTHONPATH": ""}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                raise RuntimeError(f"{command!r} ended: start it by hand to see why")
            peer = OpenVino(process)
            try:
                yield peer
            finally:
                peer.close()


def _python(home: Path) -> Path:
    environment = home / "environment"
    ready = environment / ".ready"
    if not ready.exists():
        print(f"installing {' and '.join(PACKAGES)} into {environment} (once, half a minute) …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *PACKAGES], check=True)
        ready.touch()
    return environment / "bin" / "python"


class OpenVino:
    """The program that runs (see `Service`).

    Args:
        process: with pipes for its input and output.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._numbers = count()
        self._answers: _Answers = {}
        self._reader = Thread(target=self._read, name="openvino", daemon=True)
        self._reader.start()

    def open(self) -> HistoryTalk:
        """See `Service.open`; the prefix of a conversation is found in the cache."""
        return HistoryTalk(self._request)

    def close(self) -> None:
        """Lets the program end, and waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join()

    async def _request(self, prompt: Sequence[int], num_output: int) -> list[int]:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer: asyncio.Future[list[int]] = loop.create_future()
        self._answers[number] = loop, answer
        assert self._process.stdin is not None
        print(
            json.dumps({"id": number, "prompt": list(prompt), "num_output": num_output}),
            file=self._process.stdin,
            flush=True,
        )
        return await answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            loop, future = self._answers.pop(answer["id"])
            loop.call_soon_threadsafe(future.set_result, answer["token_ids"])
        for loop, future in self._answers.values():
            loop.call_soon_threadsafe(future.set_exception, RuntimeError("OpenVINO's process has ended"))
