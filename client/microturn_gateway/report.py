"""The figures of a turn that clients are sent; docs/gateway.md describes the fields."""

from __future__ import annotations

from typing import Any

from microturn_client import Status


def report_of(status: Status, latency_ms: float) -> dict[str, Any]:
    """The figures of an ended turn, by field."""
    return {
        "latency_ms": round(latency_ms, 2),
        "server_ms": round(status.timing_ms.total, 2),
        "context_len": status.context_len,
        "kept_len": status.kept_len,
        "input_tokens": status.usage.input_tokens,
        "computed_tokens": status.usage.computed_tokens,
        "kv": _kv(status),
    }


def _kv(status: Status) -> str:
    """Where the session's KV was when the turn came, as far as its status tells."""
    usage = status.usage
    if status.timing_ms.restore > 0:
        return "restored"
    # One token more than it brought and said may be due: the last one of the answer before.
    return "computed again" if usage.computed_tokens > usage.input_tokens + usage.output_tokens + 1 else "in place"
