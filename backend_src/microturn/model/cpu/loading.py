"""Loads a model on a CPU from the settings: load, check, choose the weights' type, size the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KV_DTYPES, KVTensors
from microturn.model import latent_attention, recurrent, runner, tracing
from microturn.model.cpu import attention as native
from microturn.model.cpu import stored_model, weight_memory
from microturn.model.cpu.container_limits import free_memory
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.probe_int8 import Refused, int8_decoder
from microturn.model.cpu.weights import release_linears
from microturn.model.loaded import Loaded, needs_of, size_pool
from microturn.model.parallel.commands import Allocate, Load
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.runners import leading_runner
from microturn.model.parallel.shards import require_cuttable
from microturn.model.parallel.share import Share
from microturn.model.probe import check_model
from microturn.model.remembered_checks import Outcome, RememberedChecks
from microturn.model.traits import Traits
from microturn.settings import Settings

log = logging.getLogger(__name__)

# The result of the checks, and what makes the layers that serve; None for transformers' own.
_Decided = tuple[Outcome, Callable[[], FusedLayers | None]]

# Limit of a pool sized automatically: other programs may need the memory.
_MOST_CONTEXTS = 32


def load(settings: Settings, followers: Followers | None = None) -> Loaded:
    """Loads a model and makes it ready to serve.

    Args:
        settings: how.
        followers: the other ranks, with `tensor_parallel`; None without.

    Raises:
        InvalidArgument: it cannot be loaded or served, or the settings do not fit it.
    """
    _refuse_what_is_for_a_gpu(settings)
    remembered = _remembered(settings)
    known = remembered.recall() if remembered is not None else None
    with weight_memory.returned_at_once():
        model = stored_model.read_model(settings.model_dir, None if known is None else known.traits)
        layers = tracing.trace_layers(model) if known is None else list(known.traits.layers.values())
        if followers is not None:
            require_cuttable(model, layers, followers.size)
        layout, no_kernel_reason = _layout(settings, layers)
        if known is None:
            outcome, new_decoder = _check(settings, model, layers, layout)
            if remembered is not None:
                remembered.remember(outcome)
        else:
            outcome, new_decoder = known, partial(_new_decoder, model, layers, known)
        share = decoder = None
        if followers is None:
            decoder = new_decoder()
        elif outcome.no_fused_reason is not None:
            raise InvalidArgument(f"setting 'tensor_parallel' is 1 here: {outcome.no_fused_reason}")
        else:
            del new_decoder  # it may have layers, of the whole model
            rotary, num_threads = model.model.rotary_emb, torch.get_num_threads()
            how = Load(settings.model_dir, outcome.weights, layers, rotary, num_threads)
            share = Share.of_leader(model, how, followers)
    # In panels rounded keys are rotated ones, and integers are multiplied as they are.
    # Latent vectors serve all heads, and in int8 they deviate twice as much as keys and values of each head.
    is_int8 = layout is PageLayout.PANELS and not latent_attention.is_installed(model)
    of_auto = "int8" if is_int8 else "bfloat16"
    kv_dtype = KV_DTYPES[of_auto if settings.kv_dtype == "auto" else settings.kv_dtype]
    needs = needs_of(model, layers, kv_dtype, settings)

    def free_tokens(max_context: int) -> int:
        return min(free_memory() // 2 // needs.token_bytes, _MOST_CONTEXTS * max_context)

    pool, kv_tokens, max_context = size_pool(settings, model, needs, free_tokens)
    new_runner: Callable[..., runner.ModelRunner]
    if share is not None and followers is not None:
        pages = Allocate(pool.num_pages, pool.page_size, kv_dtype, layout)
        new_runner = partial(leading_runner, share, followers, pages)
    else:
        kv = KVTensors(
            layers,
            pool.num_pages,
            pool.page_size,
            kv_dtype,
            groups=needs.groups,
            layout=layout,
            state_bytes=recurrent.state_bytes(model),
        )
        new_runner = partial(runner.ModelRunner, model, kv, decoder=decoder)
    return Loaded(
        runner=new_runner(accepts_embeds=outcome.accepts_embeds, no_window_reason=outcome.no_window_reason),
        needs=needs,
        pool=pool,
        kv_tokens=kv_tokens,
        max_context=max_context,
        weights=outcome.weights,
        attention="native" if layout is PageLayout.PANELS else "torch",
        no_fused_reason=outcome.no_fused_reason,
        no_int8_reason=outcome.no_int8_reason,
        no_kernel_reason=no_kernel_reason,
    )


def _remembered(settings: Settings) -> RememberedChecks | None:
    """Where the result of the checks is cached; None where it is not."""
    if not settings.check_dir:
        return None
    reason, num_threads = native.unavailable_reason(), torch.get_num_threads()
    try:
        return RememberedChecks(Path(settings.check_dir), settings, no_native_reason=reason, num_threads=num_threads)
    except OSError as error:  # who loads the model tells what is wrong with it
        log.warning("the results of the checks at load are not cached: %s", error)
        return None


def _check(settings: Settings, model: PreTrainedModel, layers: Sequence[LayerShape], layout: PageLayout) -> _Decided:
    """What serves the model.

    Raises:
        InvalidArgument: it cannot be served, or not with these settings.
    """
    # In float32, whatever the type of the pages: there a difference is an error and not rounding.
    checked = check_model(model, layers, layout)
    told = checked.accepts_embeds, checked.no_window_reason, Traits.of(model, layers)
    no_int8_reason = None
    if settings.weights != "float32":
        try:
            decoder = int8_decoder(model, layers, checked.decoder, layout)
            return Outcome("int8", checked.no_fused_reason, None, *told), lambda: _with_int8(model, decoder)
        except Refused as reason:
            if settings.weights == "int8":
                raise InvalidArgument(f"setting 'weights' cannot be int8 here: {reason}; set weights=float32") from None
            log.warning("weights in float32: %s", reason)
            no_int8_reason = str(reason)
    outcome = Outcome("float32", checked.no_fused_reason, no_int8_reason, *told)
    return outcome, partial(_new_decoder, model, layers, outcome)


def _new_decoder(model: PreTrainedModel, layers: Sequence[LayerShape], outcome: Outcome) -> FusedLayers | None:
    """The layers that serve, of a model whose weights they replace or share from now on; None for transformers' own."""
    if outcome.weights == "int8":
        return _with_int8(model, FusedLayers(model, layers, Int8Linear))
    stored_model.make_resident(model)
    return FusedLayers(model, layers, Linear) if outcome.no_fused_reason is None else None


def _with_int8(model: PreTrainedModel, decoder: FusedLayers) -> FusedLayers:
    """Layers that have copies of a model's weights, which are freed."""
    release_linears(model)
    stored_model.make_resident(model)
    return decoder


def _refuse_what_is_for_a_gpu(settings: Settings) -> None:
    of_gpus = (("weights", "bfloat16"), ("weights", "float8"), ("kv_dtype", "float8"), ("attention", "flashinfer"))
    for name, value in of_gpus:
        if getattr(settings, name) == value:
            raise InvalidArgument(f"setting '{name}' cannot be {value} on a CPU")


def _layout(settings: Settings, layers: Sequence[LayerShape]) -> tuple[PageLayout, str | None]:
    """Panels where the native kernel is to be used, and can be; and why it cannot, where it was not set otherwise."""
    if settings.attention == "torch":
        return PageLayout.HND, None
    reason = native.unavailable_reason(settings.page_size, layers)
    if settings.attention == "native" and reason is not None:
        raise InvalidArgument(f"setting 'attention' cannot be native here: {reason}")
    if reason is not None:
        log.warning("attention through torch: %s", reason)
    return PageLayout.PANELS if reason is None else PageLayout.HND, reason
