"""The feed-forward part of a decoder layer: one gated block, or several, of which a router chooses some for each token.

A mixture of experts (Shazeer et al., 2017) is read where the router is a softmax of one product, as in Mixtral (Jiang
et al., 2024). Other ways to choose are not told apart by their modules: then the probe finds other logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from microturn.model.cpu.module_parts import children_of, other_parts
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.products import Product, Products

if TYPE_CHECKING:
    from microturn.model.cpu.linear import Linear

# A transformers module, whose attributes are untyped.
_Module = Any

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_FUSED = {"gate_up_proj", "down_proj", "activation_fn"}
_ROUTED = {"gate", "experts"}
_SHARED = {"shared_expert", "shared_expert_gate"}
# Weights of all experts in one: [experts, 2 * width, hidden] and [experts, hidden, width].
_STACKS = {"gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class GatedBlock:
    """``down(activation(gate) * up)``.

    Attributes:
        gate_up: the gate projection, then the up projection.
        activation: of the gate.
        down: back to the hidden size.
    """

    gate_up: Product
    activation: nn.Module
    down: Product

    @property
    def width(self) -> int:
        """Elements between the products."""
        return self.gate_up.num_out // 2

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    @classmethod
    def of(cls, module: _Module, products: Products) -> Self:
        activation = module.activation_fn if children_of(module) == _FUSED else module.act_fn
        return cls(products.fused(gate_and_up(module)), activation, products.of(module.down_proj))


@dataclass(frozen=True)
class Router:
    """Chooses the blocks of each token: those with the highest logits.

    Attributes:
        product: the logits of the blocks, then that of the shared block. In float32 in any case: rounding would choose
            other blocks.
        num_chosen: blocks of a token.
        is_normalised: whether the factors of the chosen ones add up to 1, otherwise those of all.
        shared: a block of all tokens, whose factor is the sigmoid of its logit; None without.
    """

    product: Linear
    num_chosen: int
    is_normalised: bool
    shared: GatedBlock | None

    @classmethod
    def of(cls, module: _Module, products: Products) -> Self:
        """Reads the router of a mixture of experts."""
        from microturn.model.cpu.linear import Linear  # what only a CPU needs: Numba

        router, has_shared = module.gate, hasattr(module, "shared_expert")
        weights = [router.weight.detach(), *([module.shared_expert_gate.weight.detach()] if has_shared else [])]
        return cls(
            product=Linear(torch.cat(weights).float(), None),
            num_chosen=router.top_k,
            is_normalised=getattr(router, "norm_topk_prob", True),
            shared=GatedBlock.of(module.shared_expert, products) if has_shared else None,
        )


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward part of a layer.

    Attributes:
        blocks: one, or the experts, which are alike.
        router: chooses some of them; None if there is one.
    """

    blocks: tuple[GatedBlock, ...]
    router: Router | None

    @property
    def blocks_of_token(self) -> tuple[GatedBlock, ...]:
        """As many blocks as a token needs."""
        if self.router is None:
            return self.blocks
        shared = self.router.shared
        return self.blocks[: self.router.num_chosen] + (() if shared is None else (shared,))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        of_router = 0 if self.router is None else self.router.product.num_bytes
        return of_router + sum(block.weight_bytes for block in self.blocks_of_token)

    @classmethod
    def of(cls, module: _Module, products: Products) -> Self:
        """Reads a module that is not `unlike`; weights are copied, or shared with it, one expert after another."""
        if not has_experts(module):
            return cls((GatedBlock.of(module, products),), None)
        experts = module.experts
        stacks = as_stored(experts.gate_up_proj), as_stored(experts.down_proj)
        blocks = [
            GatedBlock(products(gate_up, None), experts.act_fn, products(down, None))
            for gate_up, down in zip(*stacks, strict=True)
        ]
        return cls(tuple(blocks), Router.of(module, products))


def has_experts(module: _Module) -> bool:
    """Whether a feed-forward module that is not `unlike` chooses among experts."""
    return hasattr(module, "experts")


def stacks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of all experts in a module, by name; none if it is another module."""
    own = dict(module.named_parameters(recurse=False))
    return own if set(own) == _STACKS else {}


def unlike(module: _Module) -> Iterator[str]:
    """How a feed-forward module differs from what can be read here; the first reason counts."""
    if children_of(module) & _ROUTED:
        yield from other_parts("its mixture of experts", module, _ROUTED, _ROUTED | _SHARED)
        yield from _unlike_router(module.gate)
        experts = module.experts
        if not stacks_of(experts) or not hasattr(experts, "act_fn"):
            yield f"its experts are {type(experts).__name__}, not stacks of {' and '.join(sorted(_STACKS))} alone"
        if hasattr(module, "shared_expert"):
            yield from _unlike_gated("its shared expert", module.shared_expert)
            gate = module.shared_expert_gate
            if type(gate) is not nn.Linear or gate.out_features != 1 or gate.bias is not None:
                yield "the gate of its shared expert is another than a product"
        return
    yield from _unlike_gated("its feed-forward block", module)


def gate_and_up(module: _Module) -> list[nn.Linear]:
    """What computes the gate, then what it multiplies: two modules or one."""
    return [module.gate_up_proj] if children_of(module) == _FUSED else [module.gate_proj, module.up_proj]


def _unlike_gated(what: str, module: _Module) -> Iterator[str]:
    yield from other_parts(what, module, _GATED, _FUSED)
    for name, linear in sorted(module.named_children()):
        if name.endswith("_proj") and type(linear) is not nn.Linear:
            yield f"its {name} is a {type(linear).__name__}"
    sizes, width = [linear.out_features for linear in gate_and_up(module)], module.down_proj.in_features
    if sizes not in ([width, width], [2 * width]):
        yield f"{what} has projections that do not fit each other"


def _unlike_router(router: _Module) -> Iterator[str]:
    is_product = {name for name, _ in router.named_parameters()} == {"weight"} and not list(router.buffers())
    if not is_product or not hasattr(router, "top_k"):
        yield f"its router is a {type(router).__name__}, not the highest of one product"
