"""The 8-bit model, plainly: a stock transformers model whose linear modules round as ours do, by torch's operators."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.quantization import quantize
from microturn.model.cpu.int8_products import most_steps


class RoundedLinear(nn.Module):
    """Multiplies integers: rows of a weight in 8 bits, rows of inputs in as many as 32 bits of their sum allow."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        steps, self._scales = quantize(module.weight.detach())
        self._steps = steps.double()
        self._most_steps = most_steps(module.in_features)
        self.bias = module.bias
        # Asked for its size alone.
        self.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / self._most_steps
        sums = (x / scales).round().double() @ self._steps.t()  # whole numbers, exact in float64
        out = sums.float() * self._scales * scales
        return out if self.bias is None else out + self.bias


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with 8-bit linear modules, the head among them; the embeddings stay as they are."""
    result = copy.deepcopy(model)
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            result.set_submodule(name, RoundedLinear(module))
    result.exact = [model]  # in a list, so that it is no submodule
    return result


def exact_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model that a rounded one was made of; None for another."""
    return model.exact[0] if hasattr(model, "exact") else None
