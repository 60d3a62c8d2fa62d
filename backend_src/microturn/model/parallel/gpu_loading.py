"""Loads a model on several GPUs: its first layers are checked on one of them, then each has its share.

What is checked are whole layers, before they are cut: what a rank computes of them has the same kernels. Passes that
are replayed are compared with launched ones in the end, over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from microturn.errors import InvalidArgument
from microturn.kv.page_needs import PageNeeds
from microturn.kv.tensors import KV_DTYPES
from microturn.model import runner, tracing
from microturn.model.gpu.few_layers import check_few_layers
from microturn.model.gpu.glue import Glue
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.loading import new_glue, uses_flashinfer, weights_dtype
from microturn.model.gpu.runner import GpuRunner
from microturn.model.gpu.served_probe import check_first_layers
from microturn.model.gpu.serving import Serving
from microturn.model.loaded import Loaded, needs_of
from microturn.model.parallel.commands import Allocate, Load, TellFree
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.runners import leading_runner
from microturn.model.parallel.shards import require_cuttable
from microturn.model.parallel.share import Share
from microturn.settings import Settings


def load(settings: Settings, device: torch.device, followers: Followers) -> Loaded:
    """Loads a model and makes it ready to serve.

    Args:
        settings: how.
        device: rank 0's.
        followers: the other ranks.

    Raises:
        InvalidArgument: it cannot be loaded, served or shared, or the settings do not fit it.
    """
    for name in ("weights", "kv_dtype"):
        if getattr(settings, name) == "float8":
            raise InvalidArgument(f"setting '{name}' cannot be float8 with tensor_parallel={followers.size}")
    torch.backends.cuda.matmul.allow_tf32 = False  # see `gpu.loading.make_ready`
    dtype = weights_dtype(settings)
    kv_dtype = dtype if settings.kv_dtype == "auto" else KV_DTYPES[settings.kv_dtype]
    model = runner.load_model(settings.model_dir, dtype)
    layers, scores = tracing.trace(model)
    checked, few = check_few_layers(model, layers, scores, settings.max_batch_tokens)
    if checked.decoder is None:
        raise InvalidArgument(f"setting 'tensor_parallel' is 1 here: {checked.no_fused_reason}")
    require_cuttable(model, layers, followers.size)
    served, glue = few.in_type_of(model).to(device), new_glue(settings, device)
    few.model.to(device)
    has_flashinfer, no_kernel_reason = uses_flashinfer(settings.attention, served, layers, scores, dtype, kv_dtype)
    of_first = TorchLayers.of(served, few.layers, glue)
    check_first_layers(served, few, of_first, kv_dtype=kv_dtype, has_flashinfer=has_flashinfer)
    del served, few, of_first  # their memory is for the pool
    weights = str(dtype).removeprefix("torch.")
    how = Load(
        settings.model_dir,
        weights,
        layers,
        model.model.rotary_emb,
        for_gpu=True,
        scores=scores,
        compiled_glue=glue != Glue(),
    )
    share = Share.of_leader(model, how, followers)
    assert isinstance(share.decoder, TorchLayers)
    return SharedServing(
        model,
        share.shard.shapes,
        scores,
        replace(checked, decoder=share.decoder),
        has_flashinfer,
        no_kernel_reason,
        kv_dtype,
        None,
        settings,
        share,
        followers,
    ).make_ready(weights)


@dataclass(frozen=True)
class SharedServing(Serving):
    """`Serving` of rank 0, whose model and layers are its share.

    Attributes:
        share: see above.
        followers: the other ranks.
    """

    share: Share
    followers: Followers

    @cached_property
    def needs(self) -> PageNeeds:
        """What sessions take on all GPUs."""
        return needs_of(self.model, self.share.load.shapes, self.kv_dtype, self.settings)

    def new_runner(self, num_pages: int) -> GpuRunner:
        """See `Serving`."""
        pages = Allocate(
            num_pages + 1,
            self.settings.page_size,
            self.kv_dtype,
            has_flashinfer=self.has_flashinfer,
            max_tokens=self.settings.max_batch_tokens,
        )
        new = leading_runner(
            self.share,
            self.followers,
            pages,
            accepts_embeds=self.checked.accepts_embeds,
            no_window_reason=self.checked.no_window_reason,
        )
        assert isinstance(new, GpuRunner)
        return new

    def free_tokens(self, max_context: int) -> int:
        """See `Serving`; passes take most at rank 0, which has the embeddings and the logits besides."""
        return super().free_tokens(max_context) * self.followers.size

    def least_free_bytes(self) -> int:
        """Of all ranks' GPUs."""
        with self.followers.doing(TellFree()) as ranks:
            free = torch.tensor([super().least_free_bytes()], device=ranks.device)
            return min(int(of_rank) for of_rank in ranks.gather(free))
