"""A llama.cpp server as a peer: a slot per conversation, whose cache keeps what was said.

Prompts are token ids, so no tokenizer is in the way. Only their new part is computed, since a slot remembers.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from load_tests.bench.http_completions import HttpTalk, token_ids, wait_until_healthy
from load_tests.bench.talks import HistoryTalk
from microturn.serve.child import free_ports

# The longest context of a conversation; a slot each.
_SLOT_TOKENS = 8192


@contextmanager
def llama_cpp(llama_server: Path, gguf: Path, num_sessions: int) -> Iterator[LlamaCppServer]:
    """Serves a model to so many conversations until the block ends.

    Raises:
        RuntimeError: when the server does not get ready.
    """
    (port,) = free_ports(1)
    command = [str(llama_server), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(num_sessions), "--ctx-size", str(num_sessions * _SLOT_TOKENS)]
    # Its AMX kernels, which are chosen when weights are laid out anew, fault on virtual machines (a `ldtilecfg` that
    # traps, seen with 0.5.0 built by GCC 12). On x86 nothing else is lost by this for float32 and Q8_0.
    command += ["--threads", str(len(os.sched_getaffinity(0))), "--no-repack"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_healthy(process, port)
            yield LlamaCppServer(port, num_sessions)
        finally:
            process.terminate()


class LlamaCppServer:
    """A server that runs (see `Service`).

    Args:
        port: of loopback.
        num_slots: conversations at once.
    """

    def __init__(self, port: int, num_slots: int) -> None:
        self._port = port
        self._free_slots = list(range(num_slots))

    def open(self) -> LlamaCppTalk:
        """See `Service.open`: takes a slot, which closing gives back."""
        return LlamaCppTalk(self._port, self._free_slots)


class LlamaCppTalk(HistoryTalk):
    """A conversation in a slot of its own."""

    def __init__(self, port: int, free_slots: list[int]) -> None:
        super().__init__(self._request)
        self._http = HttpTalk(port)
        self._free_slots = free_slots
        self._slot = free_slots.pop(0)

    async def close(self) -> None:
        """See `Talk.close`."""
        self._http.close()
        self._free_slots.append(self._slot)

    async def _request(self, prompt: Sequence[int], num_output: int) -> list[int]:
        answer = await self._http.post(
            "/completion",
            {
                "prompt": list(prompt),
                "n_predict": num_output,
                "id_slot": self._slot,
                "cache_prompt": True,
                "ignore_eos": True,
                "temperature": 0,
                "return_tokens": True,
            },
        )
        return token_ids(answer["tokens"])
