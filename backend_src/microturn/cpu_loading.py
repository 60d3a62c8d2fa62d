"""From settings to a runner on a CPU: load, check, choose the weights' type, size the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import psutil
from transformers import PreTrainedModel

from microturn import runner
from microturn.attention import native
from microturn.errors import InvalidArgument
from microturn.kv_tensors import KV_DTYPES, KVTensors
from microturn.layer_groups import LayerGroups, LayerShape
from microturn.layers.decoder import FusedDecoder
from microturn.layers.weights import release_linears
from microturn.loaded import Loaded, size_pool
from microturn.probe import Checked, check_model
from microturn.probe_int8 import Refused, int8_decoder
from microturn.settings import Settings

log = logging.getLogger(__name__)

# A pool sized by itself stops here: it is memory that others on the machine may want.
_MOST_CONTEXTS = 32


def load(settings: Settings) -> Loaded:
    """Loads a model and makes it ready to serve.

    Raises:
        InvalidArgument: when it cannot be loaded or served, or the settings do not fit it.
    """
    _refuse_what_is_for_a_gpu(settings)
    use_native = _use_native(settings)
    model = runner.load_model(settings.model_dir)
    layers = runner.trace_layers(model)
    # In float32, whatever the pages will keep: there a difference is a mistake and not a rounding.
    checked = check_model(model, layers, use_native=use_native, exact=settings.deterministic)
    if settings.deterministic and (checked.decoder is None or not use_native):
        lacking = "native attention" if checked.decoder else f"layers of ours for {type(model).__name__}"
        raise InvalidArgument(f"setting 'deterministic' cannot be true here: it needs {lacking}")
    checked, weights = _with_weights(settings.weights, model, layers, checked)
    kv_dtype = KV_DTYPES["float32" if settings.kv_dtype == "auto" else settings.kv_dtype]
    groups = LayerGroups.of(layers)
    token_bytes = groups.num_groups * KVTensors.bytes_per_token(groups.slots, kv_dtype)

    def free_tokens(max_context: int) -> int:
        return min(psutil.virtual_memory().available // 2 // token_bytes, _MOST_CONTEXTS * max_context)

    pool, max_context = size_pool(settings, model, groups.num_groups, free_tokens)
    model_runner = runner.ModelRunner(
        model,
        KVTensors(layers, pool.num_pages, pool.page_size, kv_dtype, groups=groups),
        use_native=use_native,
        decoder=checked.decoder,
        exact=settings.deterministic,
        accepts_embeds=checked.accepts_embeds,
        no_window_reason=checked.no_window_reason,
    )
    return Loaded(model_runner, pool, max_context, weights, "native" if use_native else "torch")


def _refuse_what_is_for_a_gpu(settings: Settings) -> None:
    for name, value in (("weights", "bfloat16"), ("kv_dtype", "float8"), ("attention", "flashinfer")):
        if getattr(settings, name) == value:
            raise InvalidArgument(f"setting '{name}' cannot be {value} on a CPU")


def _use_native(settings: Settings) -> bool:
    reason = native.unavailable_reason()
    if settings.attention == "native" and reason is not None:
        raise InvalidArgument(f"setting 'attention' cannot be native here: {reason}")
    if settings.attention == "auto" and reason is not None:
        log.warning("attention through torch: %s", reason)
    return settings.attention != "torch" and reason is None


def _with_weights(
    wanted: str, model: PreTrainedModel, layers: Sequence[LayerShape], checked: Checked[FusedDecoder]
) -> tuple[Checked[FusedDecoder], str]:
    """As checked in float32, with layers of the type of weights that a setting names, and that type.

    With 8-bit weights the model's own are freed.

    Raises:
        InvalidArgument: when 8-bit weights are wanted that the model does not run with.
    """
    if wanted == "float32":
        return checked, "float32"
    try:
        decoder = int8_decoder(model, layers, checked.decoder)
    except Refused as reason:
        if wanted == "int8":
            raise InvalidArgument(f"setting 'weights' cannot be int8 here: {reason}; set weights=float32") from None
        log.warning("weights in float32: %s", reason)
        return checked, "float32"
    release_linears(model)
    return replace(checked, decoder=decoder), "int8"
