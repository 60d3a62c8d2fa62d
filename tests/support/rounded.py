"""The 8-bit model, plainly: a stock transformers model whose linear modules round as ours do, by torch's operators."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.quantization import quantize


def rotated(x: Tensor) -> Tensor:
    """Vectors [..., n], multiplied by Hadamard matrices of the largest power of two in n.

    The sums are ours to the bit: otherwise some elements would be rounded to the next integer.
    """
    distance = 1
    while x.shape[-1] % (2 * distance) == 0:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return x


class RoundedLinear(nn.Module):
    """Multiplies integers: rows of a weight and of inputs in 8 bits, both rotated."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        weight = module.weight.detach()
        steps, scales = quantize(rotated(weight))
        self._steps = steps.double()
        self._scales = scales / rotated(rotated(torch.ones(weight.shape[1])))[0]
        self.bias = module.bias
        # Asked for its size alone.
        self.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        steps, scales = quantize(rotated(x))
        sums = steps.double() @ self._steps.t()  # whole numbers, exact in float64
        out = sums.float() * self._scales * scales[..., None]
        return out if self.bias is None else out + self.bias


class SummedLinear(nn.Module):
    """The sum of what several ranks make of parts of the inputs, each with 8-bit weights of its own."""

    def __init__(self, module: nn.Linear, num_ranks: int) -> None:
        super().__init__()
        weights = module.weight.detach().split(module.in_features // num_ranks, dim=1)
        assert len(weights) == num_ranks, "ranks have as many inputs each"
        self._width = weights[0].shape[1]
        self._parts = [RoundedLinear(_linear(weight)) for weight in weights]
        self.bias = module.bias
        self.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = sum(part(given) for part, given in zip(self._parts, x.split(self._width, -1), strict=True))
        assert isinstance(out, Tensor)
        return out if self.bias is None else out + self.bias


class RoundedExperts(nn.Module):
    """Computes each chosen expert with 8-bit weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._experts = [
            tuple(RoundedLinear(_linear(weight)) for weight in weights)
            for weights in zip(module.gate_up_proj, module.down_proj, strict=True)
        ]
        self._activation = module.act_fn

    def forward(self, x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(self._experts):
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, up = gate_up(x[rows]).chunk(2, dim=-1)
            out[rows] += down(self._activation(gate) * up) * factors[rows, ranks, None]
        return out


def _linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return module


def rounded(model: PreTrainedModel, num_ranks: int = 1) -> PreTrainedModel:
    """A copy of a model with 8-bit linear modules, the head among them; the embeddings stay as they are.

    Args:
        num_ranks: processes that share it: the inputs of what follows attention and activation are cut among them.
    """
    result = copy.deepcopy(model)
    for name, module in model.named_modules():
        if num_ranks > 1 and name.endswith(("o_proj", "down_proj")):
            result.set_submodule(name, SummedLinear(module, num_ranks))
        elif type(module) is nn.Linear:
            result.set_submodule(name, RoundedLinear(module))
        elif hasattr(module, "gate_up_proj"):
            result.set_submodule(name, RoundedExperts(module))
    result.exact = [model]  # in a list, so that it is no submodule
    return result


def exact_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model that a rounded one was made of; None for another."""
    return model.exact[0] if hasattr(model, "exact") else None
