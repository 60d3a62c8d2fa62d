"""How a model would be served with given settings.

It is loaded and checked as by a server, and each figure is that of what was loaded.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

import psutil

from microturn.bench.about import cpu_model
from microturn.engine.loading import Prepared, build, prepare
from microturn.errors import InvalidArgument
from microturn.model import recurrent
from microturn.settings import Settings
from microturn.text.chat_templates import NO_TOOLS, tools_as_json
from microturn.text.model_text import ModelText

# Any tool: a template takes tools or does not.
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Served:
    """A model as it was loaded. Every reason is None where the best that there is could be used, or was not asked for.

    Attributes:
        layers: ``compiled`` (ours, all in one call), ``fused`` (ours, some kernels for each) or ``transformers``.
        layers_reason: why they are transformers' own.
        attention: the kernels, by their name in the settings; `attention_reason`: why torch.
        num_attention_layers: layers with KV; `num_recurrent_layers`: those with a state.
        state_bytes: of a session's state of all of these.
        weights: their type; `weights_reason`: why not 8 bits.
        weight_bytes: of them in memory.
        kv_dtype: type of the KV cache.
        token_bytes: of one more token of a session in the pages.
        kv_tokens: size of the pool in tokens; `pool_bytes` likewise.
        max_context: longest context of a session in tokens; `session_bytes` are those of its pages.
        resident_bytes: of this process, and of those that it has started, after loading, with a pool that is empty.
        full_bytes: the same with a full pool.
        peak_bytes: of this process at most, while it loaded and checked the model.
        windows_reason: why sessions cannot have a sliding window.
        accepts_embeds: whether embeddings may replace tokens.
        roles_reason: why ``role`` is refused; `tools_reason`: why tools are.
        tool_format: the family of formats in which the model writes calls; None where it is not known.
        grammars: whether answers can be constrained, which needs a token that ends them.
        spans_words: see `ModelText`.
        passes_ms: milliseconds of a warm forward pass, by its tokens.
        num_threads: of these passes.
        device: that computes them.
    """

    layers: str
    layers_reason: str | None
    attention: str
    attention_reason: str | None
    num_attention_layers: int
    num_recurrent_layers: int
    state_bytes: int
    weights: str
    weights_reason: str | None
    weight_bytes: int
    kv_dtype: str
    token_bytes: int
    kv_tokens: int
    pool_bytes: int
    max_context: int
    session_bytes: int
    resident_bytes: int
    full_bytes: int
    peak_bytes: int
    windows_reason: str | None
    accepts_embeds: bool
    roles_reason: str | None
    tools_reason: str | None
    tool_format: str | None
    grammars: bool
    spans_words: bool
    passes_ms: dict[int, float]
    num_threads: int
    device: str

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        """Reads what a prepared model is, and what this process takes now."""
        loaded, text = prepared.loaded, prepared.text
        model, kv = loaded.runner.model, loaded.runner.kv
        states = recurrent.installed(model)
        process = psutil.Process()
        resident_bytes = sum(of.memory_info().rss for of in (process, *process.children()))
        is_on_cpu = kv.device.type == "cpu"
        return cls(
            layers=loaded.layers,
            layers_reason=loaded.no_fused_reason,
            attention=loaded.attention,
            attention_reason=loaded.no_kernel_reason,
            num_attention_layers=len(kv.layers),
            num_recurrent_layers=0 if states is None else states.num_layers,
            state_bytes=0 if states is None else states.num_bytes,
            weights=loaded.weights,
            weights_reason=loaded.no_int8_reason,
            weight_bytes=loaded.weight_bytes,
            kv_dtype=loaded.kv_dtype,
            token_bytes=loaded.needs.token_bytes,
            kv_tokens=loaded.kv_tokens,
            pool_bytes=loaded.pool_bytes,
            max_context=loaded.max_context,
            session_bytes=loaded.session_bytes,
            resident_bytes=resident_bytes,
            # Pages get their memory when they are written first.
            full_bytes=resident_bytes + is_on_cpu * loaded.pool_bytes,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            windows_reason=loaded.runner.no_window_reason,
            accepts_embeds=loaded.runner.accepts_embeds,
            roles_reason=_refusal(text, NO_TOOLS),
            tools_reason=_refusal(text, tools_as_json([_TOOL])),
            tool_format=None if text.tool_format is None else text.tool_format.family,
            grammars=text.grammars(loaded.runner.vocab_size) is not None,
            spans_words=text.spans_words,
            passes_ms={num_tokens: elapsed_s * 1e3 for num_tokens, elapsed_s in prepared.passes},
            num_threads=prepared.num_threads,
            device=cpu_model() if is_on_cpu else prepared.device,
        )


def check(settings: Settings) -> Served:
    """Loads a model as a server would, and gives up what it opened.

    Raises:
        InvalidArgument: it cannot be served with these settings.
    """
    prepared = prepare(settings)
    served = Served.of(prepared)
    build(prepared, settings).stop()  # refuses settings that do not fit the model
    return served


def _refusal(text: ModelText, tools: str) -> str | None:
    """Why messages with roles, or with tools, are refused."""
    try:
        text.chat_template(tools)
    except InvalidArgument as error:
        return str(error.args[0])
    return None
