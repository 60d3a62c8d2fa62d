"""The ways in which a benchmark is served, by name.

* `session`: one streaming session per conversation; a turn sends its new tokens.
* `prefix`: every turn is a request of its own, with the whole conversation so far; the server finds the KV of the pages
  that it has seen before, as servers without sessions do. It is warm as long as nobody else needs the pages.
* `stateless`: the same requests, computed anew.
* `plain`: no server; a loop over a stock transformers model in float32, with a cache per conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from load_tests.bench.plain_loop import plain_loop
from load_tests.bench.server import running_server
from load_tests.bench.talks import Requests, Service, SessionTalk, Talk
from microturn.model_store import resolve_model

MODES = ("session", "prefix", "stateless", "plain")


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        model: a directory, or the name of an embedded model.
        settings: of our server, `key=value` as `--set` takes them.
    """

    model: str
    settings: Sequence[str] = ()


def serving(mode: str, served: Served) -> AbstractContextManager[Service]:
    """Serves in one of `MODES` until the block ends."""
    return plain_loop(resolve_model(served.model)) if mode == "plain" else _ours(mode, served)


@dataclass(frozen=True)
class _Server:
    """Our server (see `Service`)."""

    address: str
    new_talk: Callable[[str], Talk]

    def open(self) -> Talk:
        return self.new_talk(self.address)


@contextmanager
def _ours(mode: str, served: Served) -> Iterator[Service]:
    share_prefixes = f"share_prefixes={str(mode == 'prefix').lower()}"
    with running_server(served.model, share_prefixes, *served.settings) as address:
        yield _Server(address, SessionTalk if mode == "session" else Requests)
