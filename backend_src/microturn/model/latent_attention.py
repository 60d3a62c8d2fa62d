"""Multi-head latent attention over its latent vectors (DeepSeek-AI, 2024: DeepSeek-V2, section 2.1).

A token's keys and values in all heads are products of one latent vector c; beside it the heads share a rotated key r::

    key of head h   = [K_h c, r]      score = q·(K_h c) + p·r = (K_h' q)·c + p·r = [p, K_h' q] · [r, c]
    value of head h = V_h c           sum of w V_h c = V_h (sum of w c)

So queries are multiplied by K_h' and sums by V_h, and the pages have one head for all: keys [r, c], and values c with
as many elements, since a page has its keys and its values in the order in which each is read. With the sizes of
DeepSeek-V2-Lite a token takes 1,152 elements of a layer, in place of 6,144. The rotated elements come first, as in all
heads that are rotated in part.

Prompts are computed so too, though keys and values of all heads would be faster for them (vLLM has those there): a
token must not depend on how its session is divided into turns. A prompt of 4,096 tokens took 4.5 times as long.

Transformers computes the keys and values of all heads in a method of each layer, `expand_kv`, which is replaced here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from microturn.model.cpu.stored_weight import as_stored

log = logging.getLogger(__name__)

# A layer that lays its heads out in another way deviates by as much as its own result; rounding to bfloat16 by less.
_TOLERANCE = 0.05


class LatentHeads:
    """The heads of one layer.

    Args:
        weight: [heads * (key_dim + value_dim), rank]: K_h and V_h, head by head.
        num_heads: heads.
        key_dim: elements of a key that are not rotated.
    """

    def __init__(self, weight: Tensor, num_heads: int, key_dim: int) -> None:
        self._key_dim = key_dim
        of_heads = weight.view(num_heads, -1, weight.shape[1])
        self._of_keys = _Products(of_heads[:, :key_dim].transpose(1, 2))
        self._of_values = _Products(of_heads[:, key_dim:])

    @property
    def dtype(self) -> torch.dtype:
        """The type of their weights."""
        return self._of_keys.weight.dtype

    def queries(self, query: Tensor) -> Tensor:
        """Queries [1, heads, tokens, key_dim + rotated] as those of latent keys, [1, heads, tokens, rotated + rank]."""
        plain, rotated = query.tensor_split((self._key_dim,), dim=-1)
        return torch.cat((rotated, self._of_keys(plain[0])[None]), dim=-1)

    def values(self, sums: Tensor) -> Tensor:
        """Sums of latent vectors [1, tokens, heads, rank] as those of values, [1, tokens, heads, value_dim]."""
        return self._of_values(sums[0].transpose(0, 1)).transpose(0, 1)[None]

    @staticmethod
    def expand_kv(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """In place of a layer's own method: keys and values of one head.

        Args:
            latents: [1, 1, tokens, rank].
            rotated: [1, 1, tokens, rotated].
        """
        return torch.cat((rotated, latents), dim=-1), latents


class _Products:
    """A product for each head, bitwise the same for a row in any batch where a kernel can compute it.

    Attributes:
        weight: contiguous.

    Args:
        weight: [heads, out, in].
    """

    def __init__(self, weight: Tensor) -> None:
        # A copy, since it may be mapped from a file.
        self.weight = weight.clone(memory_format=torch.contiguous_format)
        self._array = _as_array(self.weight) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        """The products [heads, rows, out] of [heads, rows, in]."""
        if self._array is None or x.dtype != torch.float32:
            return x @ self.weight.to(x.dtype).transpose(1, 2)
        from microturn.model.cpu import float_products

        out = x.new_empty(*x.shape[:2], self._array.shape[1])
        float_products.multiply_each(x.contiguous().numpy(), self._array, out.numpy())
        return out


def _as_array(weight: Tensor) -> NDArray[Any] | None:
    """The weight as kernels take it, on a CPU; None where they cannot."""
    from microturn.model.cpu import attention as native
    from microturn.model.cpu import float_products  # what only a CPU needs: Numba

    fits = native.unavailable_reason() is None and float_products.fits(weight[0])
    return float_products.as_array(weight) if fits else None


@torch.inference_mode()
def install(model: nn.Module) -> None:
    """Makes the layers of a model hand latent vectors to our attention, where they have any.

    To be called again when the model has been converted to another type or moved to another device.
    """
    for module in model.modules():
        module.__dict__.pop("expand_kv", None)
        module.__dict__.pop("latent_heads", None)
        heads = _new_heads(module)
        if heads is not None:
            module.__dict__.update(expand_kv=heads.expand_kv, latent_heads=heads)


@contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Has layers compute the keys and values of all heads meanwhile, as transformers does, for its own attention."""
    layers = [module for module in model.modules() if "expand_kv" in module.__dict__]
    of_layers = [module.__dict__.pop("expand_kv") for module in layers]
    try:
        yield
    finally:
        for module, expand_kv in zip(layers, of_layers, strict=True):
            module.__dict__["expand_kv"] = expand_kv


def is_installed(model: nn.Module) -> bool:
    """Whether layers of the model hand latent vectors to our attention."""
    return any(heads_of(module) is not None for module in model.modules())


def heads_of(module: nn.Module) -> LatentHeads | None:
    """The heads of an attention module over latent vectors; None for another module."""
    return module.__dict__.get("latent_heads")


def _new_heads(module: nn.Module) -> LatentHeads | None:
    product = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or not isinstance(product, nn.Linear) or product.bias is not None:
        return None
    weight = as_stored(product.weight)
    try:
        heads = LatentHeads(weight, module.num_heads, module.qk_nope_head_dim)
        return heads if weight.is_meta or _agree(heads, module, weight) else None
    except Exception as reason:  # the method or the sizes are of another kind
        log.debug("%s keeps the keys and values of all heads: %s", type(module).__name__, reason)
        return None


def _agree(heads: LatentHeads, module: nn.Module, weight: Tensor) -> bool:
    """Whether products of random queries and keys, and values, are those of the layer's own keys and values."""
    generator = torch.Generator().manual_seed(0)
    key_dim, rotated_dim = int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)  # type: ignore[arg-type]
    num_heads, rank = int(module.num_heads), weight.shape[1]  # type: ignore[arg-type]
    dtype = next(module.parameters()).dtype
    latents, rotated, query = (
        torch.randn(1, count, 2, size, generator=generator).to(weight.device, dtype)
        for count, size in ((1, rank), (1, rotated_dim), (num_heads, key_dim + rotated_dim))
    )
    keys, values = module.expand_kv(latents, rotated)  # type: ignore[operator]
    ours, of_ours = heads.expand_kv(latents, rotated)
    sums = of_ours.transpose(1, 2).expand(-1, -1, num_heads, -1)
    pairs = (
        (heads.queries(query) @ ours.transpose(2, 3), query @ keys.transpose(2, 3)),
        (heads.values(sums), values.transpose(1, 2)),
    )
    return all(got.shape == own.shape and bool((got - own).norm() <= _TOLERANCE * own.norm()) for got, own in pairs)
