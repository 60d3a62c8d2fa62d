"""The ways in which a benchmark is served, by name.

* `session`: one streaming session per conversation; a turn sends its new tokens, and its answer comes token by token.
* `spaced`: the same, but tokens behind the first share responses that are 50 ms apart.
* `whole`: the same, but the answer comes when it has ended, as all peers' answers do here.
* `prefix`: every turn is a request of its own, with the whole conversation so far; the server finds the KV of the pages
  that it has seen before, as servers without sessions do. It is warm as long as nobody else needs the pages.
* `stateless`: the same requests, computed anew.
* `plain`: no server; a loop over a stock transformers model in float32, with a cache per conversation.
* `openvino`: OpenVINO GenAI, from the same weights in Q8_0, with prefix caching.
* `vllm`: vLLM's CPU build in float32, with prefix caching.
* `llama.cpp …`: a llama.cpp server, by the name of its GGUF file; a slot per conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load_tests.bench.llama_cpp import llama_cpp
from load_tests.bench.openvino_peer import openvino
from load_tests.bench.plain_loop import plain_loop
from load_tests.bench.talks import Requests, Service, SessionTalk, Talk
from load_tests.bench.vllm_cpu import vllm_cpu
from microturn.serve.child import running_server
from microturn.zoo.store import resolve_model

OWN_MODES = ("session", "spaced", "whole", "prefix", "stateless", "plain")


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        model: a directory, or the name of an embedded model.
        num_sessions: conversations at once.
        settings: of our server, `key=value` as `--set` takes them.
        llama_server: the program `llama-server`, for its modes.
        ggufs: the models that it serves, the same weights as `model`.
    """

    model: str
    num_sessions: int
    settings: Sequence[str] = ()
    llama_server: Path | None = None
    ggufs: Sequence[Path] = ()

    @property
    def suffix(self) -> str:
        """What the settings add to the name of a result."""
        return "".join(f"-{setting.replace('=', '-')}" for setting in self.settings)

    @property
    def llama_modes(self) -> dict[str, Path]:
        """The modes of a llama.cpp server, and what each serves."""
        return {f"llama.cpp {gguf.stem}": gguf for gguf in self.ggufs}


def serving(mode: str, served: Served) -> AbstractContextManager[Service]:
    """Serves in one mode until the block ends.

    Raises:
        RuntimeError: when a server does not get ready.
    """
    match mode:
        case "plain":
            return plain_loop(resolve_model(served.model))
        case "openvino":
            return openvino(served.model)
        case "vllm":
            return vllm_cpu(resolve_model(served.model), served.num_sessions)
        case "session" | "spaced" | "whole" | "prefix" | "stateless":
            return _ours(mode, served)
    if served.llama_server is None:
        raise RuntimeError("--llama-server is missing: name the program, or build it with `make llama-server`")
    return llama_cpp(served.llama_server, served.llama_modes[mode], served.num_sessions)


@dataclass(frozen=True)
class MicroturnServer:
    """Our server (see `Service`).

    Attributes:
        address: of its gRPC endpoint.
        new_talk: makes a conversation with the server of an address.
    """

    address: str
    new_talk: Callable[[str], Talk]

    def open(self) -> Talk:
        return self.new_talk(self.address)


# How our server's modes hold a conversation.
TALKS: Mapping[str, Callable[[str], Talk]] = {
    "session": SessionTalk,
    "spaced": partial(SessionTalk, stream_interval_ms=50),
    "whole": partial(SessionTalk, stream=False),
    "prefix": Requests,
    "stateless": Requests,
}


@contextmanager
def _ours(mode: str, served: Served) -> Iterator[Service]:
    share_prefixes = f"share_prefixes={str(mode == 'prefix').lower()}"
    with running_server(served.model, share_prefixes, *served.settings) as address:
        yield MicroturnServer(address, TALKS[mode])
