"""The engine's settings: one frozen dataclass, validated once.

They come from ``parameters`` in config.pbtxt, where every value is a string; ``microturn serve --set name=value``
overrides them. Values that can be derived are not settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from microturn.errors import InvalidArgument, did_you_mean

# Triton drops a sequence after its own idle time (config.pbtxt) without telling the model. Ours must end first.
MAX_IDLE_TIMEOUT_S = 3600.0

# The name under which a trusted proxy says whose request this is; hosts hand that header on as a parameter.
TENANT_HEADER = "x-microturn-tenant"

# How a snapshot_dir in a bucket begins.
S3_SCHEME = "s3://"

_PARSERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
}


@dataclass(frozen=True)
class Settings:
    """How an engine runs.

    Attributes:
        model_dir: a Hugging Face model directory.
        device: where the model computes: ``cpu``, ``cuda``, or ``auto``, a GPU where there is one.
        weights: their type, ``auto`` (int8 on a CPU where the model's layers can have it, bfloat16 on a GPU), ``int8``
            (a step reads a quarter of the bytes, and logits change: `make bench-weights` measures how much; on a CPU),
            ``bfloat16`` (on a GPU), ``float8`` (e4m3, on a GPU from Ada on: what ``auto`` is for a checkpoint in FP8,
            whose scales are kept; weights of others are rounded at load, with a scale for each output) or ``float32``
            (on a CPU weights stay in the type of their file, and are widened in each product).
        attention: the kernels: ``native`` (on a CPU), ``flashinfer`` (on a GPU), ``torch`` (slow, runs everywhere), or
            ``auto``, the first of them that can run.
        cuda_graphs: small steps are replayed from CUDA graphs (on a GPU); ``false`` launches each kernel by itself, to
            see whether a failure is theirs.
        compiled_glue: what lies between products and attention is compiled by torch (on a GPU); ``false`` runs it
            operation by operation, likewise.
        kv_dtype: type of the KV cache, ``auto`` (int8 on a CPU, or bfloat16 with torch's or latent attention; on a GPU
            that of the weights), ``float32``, ``bfloat16``, ``float8`` (on a GPU) or ``int8``: smaller types have room
            for more tokens and change logits more (`make bench-kv` measures how much).
        kv_tokens: size of the KV pool, in tokens that all layers keep; 0 takes half of the memory that is free after
            loading, of a container's limit too, at most 32 contexts, or on a GPU all memory left by everything else.
            With sliding-window layers more tokens fit.
        page_size: tokens in a page; native attention wants a multiple of 16.
        max_sessions: limit of live sessions; further ones are refused. At most three quarters of
            `max_candidate_sequences` in config.pbtxt.
        max_sessions_per_tenant: live sessions of one tenant, where a trusted proxy names one in the header
            ``x-microturn-tenant``, on this server; with 0 the header is refused.
        max_session_bytes: bytes of one session over all tiers, its KV and the inputs that are kept; a turn with which
            it would take more is refused. 0 is what the longest context takes that was told in embeddings alone, with
            `history_bytes` behind its window.
        max_tenant_bytes: the same for all sessions of one tenant; sessions without a tenant count as one tenant's. 0 is
            no limit.
        max_batch_tokens: maximum tokens of one forward pass.
        max_context: longest context of a session in tokens; 0 is the length that the model was trained for.
        window_slack: tokens that are evicted at a time when a session's window slides, in whole pages; a rewind by as
            many is always possible, and needs no recomputation with sliding-window layers either.
        history_bytes: ids and embeddings behind its window that a session keeps, so that lost KV is recomputed as it
            was; beyond that they are dropped, and the session continues from what the window shows. 0 keeps none; a
            session with ``history=whole`` keeps all.
        max_queued_turns: limit of turns that wait behind a running one in a session.
        idle_timeout_s: a session that is silent for longer expires; a session may ask for another time.
        num_threads: threads of a forward pass; 0 is one for each CPU that this process may use, or of its container's
            limit.
        bind_threads: if there is a thread for each CPU, each is bound to its own, where the layers are one compiled
            call; and each process of `tensor_parallel` to its share of the CPUs.
        tensor_parallel: processes that share the model, each with its part of every layer's heads, weights and KV: on
            the first GPUs that this process sees, or on a CPU with its part of CPUs and threads, for machines with
            several sockets. The layers must be ours, and their key-value heads a multiple of it.
        share_prefixes: full pages of a session's first turn stay in the pool while there is room, and sessions of the
            same tenant and `cache_salt` that begin with the same tokens share them.
        check_dir: directory for the results of the checks at load, so that a restart with the same model, sources,
            libraries and processor does not repeat them; empty repeats them at every start, as loading for a GPU does.
        snapshot_dir: directory where live sessions are saved when the server stops, and restored from, or
            ``s3://bucket/prefix`` (with the extra ``s3``); empty is none.
        snapshot_key_file: a file with a secret, by which everything in `snapshot_dir` is encrypted; all servers that
            share it need the same. Empty is unencrypted.
        snapshot_ttl_s: how long a saved session can be restored.
        snapshot_every_s: how often live sessions are saved as well, with the KV that has come since, so that they go on
            elsewhere if the server dies; 0 is only when it stops.
        admin_socket: the path of the admin socket; empty is none.
        peer_address: ``host:port`` on which this server takes sessions from others of its model; empty is nowhere.
        peers: where the others take sessions, ``host:port``, separated by commas; of a name with several addresses each
            is a server, and this one may be among them. A server that stops hands its sessions over to them.
        peer_key_file: a file with the secret that all of them share; only on loopback none is needed.
        edge_address: ``host:port`` by which Envoy reaches this server, for clients of sessions that are handed over to
            it; empty where there is no such edge.
        moves_per_minute: sessions that this server moves to emptier ones at most; 0 is none. Needs an `edge_address`.
        host_tier_bytes: host memory for the KV of parked sessions that no longer fit the pool; with 0 it is dropped and
            recomputed. On a CPU the pool is host memory itself: raise `kv_tokens` first, and this only where
            `disk_tier_dir` is set. With a GPU all of it is allocated and pinned at the start.
        disk_tier_dir: directory for KV that no longer fits host memory; empty is none.
        disk_tier_bytes: limit of the files there; 0 is half of the free disk space at the start.
        log_turns: log lines of turns, in addition to those of sessions: ``none``, ``all`` (how it ended and how long it
            took) or ``text`` (also input and output, that is, what users say).
        otlp_endpoint: an OpenTelemetry collector (``http://127.0.0.1:4318``) that gets spans of the turns whose
            `traceparent` is sampled; empty uses the variable OTEL_EXPORTER_OTLP_ENDPOINT, if set.
    """

    model_dir: str = ""
    device: str = "auto"
    weights: str = "auto"
    attention: str = "auto"
    cuda_graphs: bool = True
    compiled_glue: bool = True
    kv_dtype: str = "auto"
    kv_tokens: int = 0
    page_size: int = 16
    max_sessions: int = 256
    max_sessions_per_tenant: int = 0
    max_session_bytes: int = 0
    max_tenant_bytes: int = 0
    max_batch_tokens: int = 256
    max_context: int = 0
    window_slack: int = 256
    history_bytes: int = 1 << 20
    max_queued_turns: int = 8
    idle_timeout_s: float = 60.0
    num_threads: int = 0
    bind_threads: bool = True
    tensor_parallel: int = 1
    share_prefixes: bool = True
    check_dir: str = ""
    snapshot_dir: str = ""
    snapshot_key_file: str = ""
    snapshot_ttl_s: float = 3600.0
    snapshot_every_s: float = 0.0
    admin_socket: str = ""
    peer_address: str = ""
    peers: str = ""
    peer_key_file: str = ""
    edge_address: str = ""
    moves_per_minute: int = 60
    host_tier_bytes: int = 0
    disk_tier_dir: str = ""
    disk_tier_bytes: int = 0
    log_turns: str = "none"
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        choices = {
            "device": ("auto", "cpu", "cuda"),
            "weights": ("auto", "float32", "bfloat16", "float8", "int8"),
            "attention": ("auto", "native", "flashinfer", "torch"),
            "kv_dtype": ("auto", "float32", "bfloat16", "float8", "int8"),
            "log_turns": ("none", "all", "text"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"setting '{name}' is one of {', '.join(allowed)}, not '{getattr(self, name)}'")
        at_least_one = (
            "page_size",
            "max_sessions",
            "max_batch_tokens",
            "window_slack",
            "max_queued_turns",
            "tensor_parallel",
        )
        for name in (
            "kv_tokens",
            "page_size",
            "max_sessions",
            "max_sessions_per_tenant",
            "max_session_bytes",
            "max_tenant_bytes",
            "max_batch_tokens",
            "max_context",
            "window_slack",
            "history_bytes",
            "max_queued_turns",
            "tensor_parallel",
            "host_tier_bytes",
            "disk_tier_bytes",
            "moves_per_minute",
        ):
            least = int(name in at_least_one)
            if getattr(self, name) < least:
                raise InvalidArgument(f"setting '{name}' is at least {least}, not {getattr(self, name)}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidArgument("setting 'otlp_endpoint' is an address such as http://127.0.0.1:4318")
        if not 0 < self.idle_timeout_s <= MAX_IDLE_TIMEOUT_S:
            raise InvalidArgument(f"setting 'idle_timeout_s' is above 0 and at most {MAX_IDLE_TIMEOUT_S:g}")
        if not 0 <= self.snapshot_every_s < math.inf:
            raise InvalidArgument("setting 'snapshot_every_s' is at least 0, in seconds")
        if not 0 < self.snapshot_ttl_s < math.inf:
            raise InvalidArgument("setting 'snapshot_ttl_s' is above 0, in seconds")

    @classmethod
    def from_strings(cls, values: Mapping[str, str]) -> Self:
        """Reads settings given as text.

        Raises:
            InvalidArgument: an unknown name (with the nearest known one) or a value that does not parse.
        """
        types = {field.name: field.type for field in fields(cls)}
        parsed: dict[str, object] = {}
        for name, text in values.items():
            if name not in types:
                raise InvalidArgument(f"unknown setting '{name}': {did_you_mean(name, types)}")
            try:
                parsed[name] = _PARSERS[str(types[name])](text)
            except (ValueError, KeyError) as error:
                raise InvalidArgument(f"setting '{name}' is of type {types[name]}, not '{text}'") from error
        return cls(**parsed)  # type: ignore[arg-type]

    def within_slots(self, num_slots: int) -> Self:
        """These settings with `max_sessions` of at most three quarters of Triton's sequence slots.

        The rest is for refused STARTs, health turns, and clients that return to an ended session. Without a free slot a
        START waits without an answer.

        Raises:
            InvalidArgument: there are too few slots for a session.
        """
        if num_slots < 2:
            raise InvalidArgument(f"max_candidate_sequences in config.pbtxt is at least 2, not {num_slots}")
        return replace(self, max_sessions=min(self.max_sessions, num_slots - max(1, num_slots // 4)))


def absolute_place(text: str) -> str:
    """A snapshot_dir that does not depend on where the process runs."""
    return text if text.startswith(S3_SCHEME) else str(Path(text).absolute())


def read_secret(setting: str, path: str) -> str:
    """The secret in a file that a setting names; empty if it names none.

    Raises:
        InvalidArgument: the file cannot be read, or the secret has less than 16 characters.
    """
    if not path:
        return ""
    try:
        secret = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{setting} {path} cannot be read: {error}") from error
    if len(secret) < 16:
        raise InvalidArgument(f"{setting} {path} has a secret of {len(secret)} characters: 16 are the least")
    return secret
