"""The engine's settings: one frozen dataclass, validated once.

They come from ``parameters`` in config.pbtxt, where every value is a string; ``microturn serve --set name=value``
overrides them there. What can be derived is not a setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from microturn.errors import InvalidArgument
from microturn.nearest import did_you_mean

# Triton forgets a sequence after its own idle time (config.pbtxt) without telling the model. Ours must end first.
MAX_IDLE_TIMEOUT_S = 3600.0

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
            ``bfloat16`` (on a GPU) or ``float32``.
        deterministic: a session's logits are the same to the bit in whatever company and chunks it is computed, and
            after whatever preemption or restoring; slower.
        attention: whose kernels: ``native`` (on a CPU), ``flashinfer`` (on a GPU), ``torch`` (slow, runs everywhere),
            or ``auto``, the first of them that can run.
        kv_dtype: type of the KV cache, ``auto`` (float32 on a CPU, that of the weights on a GPU), ``float32``,
            ``bfloat16``, ``float8`` (on a GPU) or ``int8``: the smaller, the more tokens there is room for, and the
            more logits change (`make bench-kv` measures how much).
        kv_tokens: size of the KV pool, in tokens that all layers keep; 0 takes half of the memory that is free after
            loading, at most 32 contexts, or on a GPU what is left of its memory when everything else has some. Where
            layers have a window of their own, more tokens fit.
        page_size: tokens in a page.
        max_sessions: live sessions; one more is refused. At most three quarters of `max_candidate_sequences` in
            config.pbtxt.
        max_sessions_per_tenant: live sessions of one tenant, where a trusted proxy names one in the header
            ``x-microturn-tenant``, on this server; 0 is that no proxy does, and then the header is refused.
        max_session_bytes: bytes of one session over all tiers, its KV and the inputs that are kept; a turn with which
            it would take more is refused. 0 is what the longest context takes that was told in embeddings alone, with
            `history_bytes` behind its window.
        max_tenant_bytes: the same of all sessions of one tenant; those for which no proxy names one count as one
            tenant's. 0 is no limit.
        max_batch_tokens: tokens that one forward pass computes at most.
        max_context: longest context of a session in tokens; 0 is what the model was trained for.
        window_slack: tokens that go at a time when a session's window slides, in whole pages; a rewind by as many is
            always possible, and costs nothing either where layers have a window of their own.
        history_bytes: ids and embeddings behind its window that a session keeps, so that KV that is lost is computed
            again as it was; once they take more, they are forgotten, and it goes on from what the window shows. 0 keeps
            none; a session with ``history=whole`` keeps all.
        max_queued_turns: turns that may wait behind a running one in a session.
        idle_timeout_s: a session that is silent for longer expires; a session may ask for another time.
        num_threads: threads of a forward pass; 0 is one per core this process may use.
        share_prefixes: full pages of a session's first turn stay in the pool as long as there is room, and a session
            of the same tenant and `cache_salt` that begins with the same tokens takes them up.
        snapshot_dir: where live sessions are saved when the server stops, and where they are found again; empty is
            nowhere.
        snapshot_ttl_s: how long a session that was saved there may be taken up.
        admin_socket: the path of the admin socket; empty is none.
        host_tier_bytes: host memory for the KV of parked sessions that no longer fit the pool; 0 is none, and then it
            is computed again. On a CPU the pool is host memory itself: raise `kv_tokens` first, and this only where
            `disk_tier_dir` is set. With a GPU all of it is taken at the start, and cannot be swapped out.
        disk_tier_dir: directory for KV that no longer fits host memory either; empty is none.
        disk_tier_bytes: what the files there may take; 0 is half of what is free at the start.
        log_turns: whether each turn leaves a line in the log, beside those of sessions: ``none``, ``all`` (how it ended
            and how long it took) or ``text`` (also what came in and went out: what users say).
        otlp_endpoint: an OpenTelemetry collector (``http://127.0.0.1:4318``) that gets spans of the turns whose
            `traceparent` is sampled; empty is what the variable OTEL_EXPORTER_OTLP_ENDPOINT says, or none.
    """

    model_dir: str = ""
    device: str = "auto"
    weights: str = "auto"
    deterministic: bool = False
    attention: str = "auto"
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
    share_prefixes: bool = True
    snapshot_dir: str = ""
    snapshot_ttl_s: float = 3600.0
    admin_socket: str = ""
    host_tier_bytes: int = 0
    disk_tier_dir: str = ""
    disk_tier_bytes: int = 0
    log_turns: str = "none"
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        choices = {
            "device": ("auto", "cpu", "cuda"),
            "weights": ("auto", "float32", "bfloat16", "int8"),
            "attention": ("auto", "native", "flashinfer", "torch"),
            "kv_dtype": ("auto", "float32", "bfloat16", "float8", "int8"),
            "log_turns": ("none", "all", "text"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"setting '{name}' is one of {', '.join(allowed)}, not '{getattr(self, name)}'")
        at_least_one = ("page_size", "max_sessions", "max_batch_tokens", "window_slack", "max_queued_turns")
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
            "host_tier_bytes",
            "disk_tier_bytes",
        ):
            least = int(name in at_least_one)
            if getattr(self, name) < least:
                raise InvalidArgument(f"setting '{name}' is at least {least}, not {getattr(self, name)}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidArgument("setting 'otlp_endpoint' is an address such as http://127.0.0.1:4318")
        if not 0 < self.idle_timeout_s <= MAX_IDLE_TIMEOUT_S:
            raise InvalidArgument(f"setting 'idle_timeout_s' is above 0 and at most {MAX_IDLE_TIMEOUT_S:g}")
        if not 0 < self.snapshot_ttl_s < math.inf:
            raise InvalidArgument("setting 'snapshot_ttl_s' is above 0, in seconds")

    @classmethod
    def from_strings(cls, values: Mapping[str, str]) -> Self:
        """Reads settings given as text.

        Raises:
            InvalidArgument: for an unknown name (with the nearest known one) or a value that does not parse.
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
        """These settings with no more sessions than three quarters of Triton's sequence slots.

        The rest is for STARTs that are refused, for health turns, and for clients that come back to a session that
        ended. Without a slot a START waits in silence.

        Raises:
            InvalidArgument: there are too few slots for a session.
        """
        if num_slots < 2:
            raise InvalidArgument(f"max_candidate_sequences in config.pbtxt is at least 2, not {num_slots}")
        return replace(self, max_sessions=min(self.max_sessions, num_slots - max(1, num_slots // 4)))
