"""What `microturn check` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from microturn.planning.check import Served
from microturn.planning.on_disk import OnDisk
from microturn.planning.sizes import size

_LAYERS = {
    "compiled": "fast: one compiled call for all of them",
    "fused": "fast: fused kernels, layer by layer",
    "transformers": "transformers' own, which are slower",
}


def lines(on_disk: OnDisk, served: Served | None) -> Iterator[str]:
    """A model's report; what is not served is known from its files alone."""
    yield (
        f"{on_disk.model} ({on_disk.architecture}, {on_disk.num_params / 1e6:,.1f} M parameters, "
        f"{size(on_disk.stored_bytes)} on disk, {on_disk.stored_dtype})"
    )
    rows = _rows(served) if served is not None else [("served", "no")]
    for name, text in rows:
        yield f"{name:<12}{text}"


def _rows(served: Served) -> Iterator[tuple[str, str]]:
    yield "served", "yes"
    yield "layers", _because(_LAYERS[served.layers], served.layers_reason)
    yield "attention", _because(served.attention, served.attention_reason)
    if served.num_recurrent_layers:
        num_layers = served.num_recurrent_layers + served.num_attention_layers
        yield (
            "recurrent",
            f"{served.num_recurrent_layers} of {num_layers} layers, a state of {size(served.state_bytes)}",
        )
    yield "weights", _because(f"{served.weights}, {size(served.weight_bytes)}", served.weights_reason)
    yield (
        "KV",
        f"{served.kv_dtype}, {size(served.token_bytes)} a token; a pool of {served.kv_tokens:,} tokens: "
        f"{size(served.pool_bytes)}; a session of max_context ({served.max_context:,}): {size(served.session_bytes)}",
    )
    yield (
        "memory",
        f"{size(served.resident_bytes)} with an empty pool, {size(served.full_bytes)} with a full one; "
        f"{size(served.peak_bytes)} at most while loading (this process)",
    )
    yield "windows", _yes(served.windows_reason)
    yield "embeddings", "yes" if served.accepts_embeds else "no"
    yield "roles", _yes(served.roles_reason)
    yield "tools", _tools(served)
    yield "grammars", _yes(None if served.grammars else "no token of this model ends an answer")
    if served.spans_words:
        yield "text", "is held until a turn generates: tokens of this model can span words"
    passes = ", ".join(f"{_count(n, 'token')} in {ms:.1f} ms" for n, ms in served.passes_ms.items())
    yield "speed here", f"{passes} (warm, {_count(served.num_threads, 'thread')}, {served.device})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _because(what: str, reason: str | None) -> str:
    return what if reason is None else f"{what}: {reason}"


def _yes(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def _tools(served: Served) -> str:
    if served.tools_reason is not None:
        return f"no: {served.tools_reason}"
    if served.tool_format is None:
        return "yes, but tool_choice cannot force a call: how this model writes calls is not known"
    return f"yes, calls as {served.tool_format}"
