"""Matrix products of 8-bit floats (e4m3): a byte for each weight, and twice the rate of bfloat16 on Ada and Hopper.

A weight has a scale for each of its rows, or for blocks of each row as in DeepSeek's checkpoints. Inputs are rounded
likewise, each token by itself. Rows are multiplied by torch, blocks by a kernel of ours (`block_product`).

A published checkpoint is loaded with its plain weights and their scales; weights divided by these are the published
numbers again, exactly: what a weight was rounded to when it became plain is a hundredth of what numbers lie apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from microturn.errors import reason_of
from microturn.model.gpu import float8
from microturn.model.products import Product, TorchLinear, stacked

log = logging.getLogger(__name__)

# Rounds vectors (see `float8.quantize`).
Quantize = Callable[[Tensor, int], tuple[Tensor, Tensor]]

# The first GPUs that multiply 8-bit floats (Ada); what torch multiplies there has sides of whole vectors of 16 bytes.
_LEAST_CAPABILITY = (8, 9)
_SIDE = 16

# Rows with which a product is tried: cuBLAS has algorithms for some weights with many rows alone.
_TRIED_ROWS = (1, 16, 256, 512)

# Norm of the difference of weights from their numbers times scales, relative to theirs: bfloat16 rounds by 2e-3, and
# numbers of other scales by 2e-2.
_ROUNDING = 5e-3


def unavailable_reason(device: torch.device) -> str | None:
    """Why a device cannot multiply 8-bit floats; None if it can. A CPU can, slowly, for tests."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} is older than Ada, the first that multiplies 8-bit floats"


def rounding_on(device: torch.device) -> Quantize:
    """What rounds inputs on a device."""
    if device.type != "cuda":
        return float8.quantize
    from microturn.model.gpu import float8_kernel  # needs OpenAI's Triton, which is not installed for a CPU

    return float8_kernel.quantize


class Float8Linear:
    """A `Product` of 8-bit floats into bfloat16, or float32 on a CPU.

    Attributes:
        weight: the numbers [out, in].
        has_blocks: whether its rows have several scales each: then the kernel is ours.

    Args:
        weight: see above.
        scales: float32 [out, blocks of inputs].
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.num_out, num_in = weight.shape
        self.num_bytes = weight.nbytes + scales.nbytes
        self.weight = weight
        self._scales = scales
        self._bias = bias
        self._block = num_in // scales.shape[1]
        self.has_blocks = scales.shape[1] > 1
        self._quantize = rounding_on(weight.device)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        numbers, scales = self._quantize(x, self._block)
        if self.has_blocks:
            from microturn.model.gpu import block_product  # needs OpenAI's Triton, which is not installed for a CPU

            return block_product.multiply(numbers, scales, self.weight, self._scales, self._bias, out)
        return torch._scaled_mm(
            numbers, self.weight.t(), scales, self._scales.t(), bias=self._bias, out_dtype=out.dtype, out=out
        )


class Float8Products:
    """Creates products of 8-bit floats, over copies of weights; modules keep the copies as theirs, and cannot run.

    Where 8-bit floats cannot be multiplied, or a checkpoint has left weights as they were, a product is torch's.

    Args:
        scales: of a published checkpoint's weights, float32 [out, blocks of inputs]; None rounds each row anew.
    """

    def __init__(self, scales: Mapping[nn.Module, Tensor] | None = None) -> None:
        self._scales = scales
        # By the shape of a weight, whether torch multiplies by it.
        self._can_run: dict[torch.Size, bool] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See `Products`; each row is rounded anew."""
        if not _can_multiply(weight, 1):
            return TorchLinear(weight, bias)
        return Float8Linear(*float8.quantize(weight, weight.shape[1]), bias)

    @torch.no_grad()
    def fused(self, modules: Sequence[nn.Linear]) -> Product:
        """See `Products`."""
        weight, bias = stacked(modules)
        product = self(weight, bias) if self._scales is None else self._published(modules, weight, bias)
        if not isinstance(product, Float8Linear) or not self._runs(product, weight.dtype):
            return TorchLinear.fused(modules)
        first = 0
        for module in modules:
            numbers = product.weight[first : first + module.out_features]
            module.weight = nn.Parameter(numbers, requires_grad=False)
            first += module.out_features
        return product

    def of(self, module: nn.Linear) -> Product:
        """See `Products`."""
        return self.fused([module])

    def _runs(self, product: Float8Linear, dtype: torch.dtype) -> bool:
        shape = product.weight.shape
        if product.has_blocks:
            return True
        if shape not in self._can_run:
            reason = _failure_of(product, dtype)
            self._can_run[shape] = reason is None
            if reason is not None:
                log.warning("weights of %d by %d are served without 8-bit floats: %s", *shape, reason)
        return self._can_run[shape]

    def _published(self, modules: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> Product | None:
        """The product by published scales; None where not all modules have some that are theirs."""
        assert self._scales is not None
        given = [self._scales.get(module) for module in modules]
        of_modules = [scales.to(weight.device) for scales in given if scales is not None]
        if len(of_modules) < len(modules) or len({scales.shape[1] for scales in of_modules}) > 1:
            return None
        scales = torch.cat(of_modules)
        if len(scales) != len(weight) or not _can_multiply(weight, scales.shape[1]):
            return None
        numbers = float8.encode(weight, scales)
        difference = float8.decode(numbers, scales).sub_(weight).norm()
        # Written so that NaN fails too.
        if not difference <= _ROUNDING * weight.float().norm():
            return None
        return Float8Linear(numbers, scales, bias)


def _failure_of(product: Float8Linear, dtype: torch.dtype) -> str | None:
    """Why a product of inputs of this type fails; None if it does not."""
    num_out, num_in = product.weight.shape
    try:
        for num_rows in _TRIED_ROWS:
            x = torch.zeros(num_rows, num_in, dtype=dtype, device=product.weight.device)
            product(x, x.new_empty(num_rows, num_out))
    except RuntimeError as error:
        return reason_of(error)
    return None


def _can_multiply(weight: Tensor, num_blocks: int) -> bool:
    """Whether a weight of this shape can be multiplied with so many scales in a row."""
    if num_blocks == 1:
        return not any(size % _SIDE for size in weight.shape)
    from microturn.model.gpu import block_product  # see above

    return weight.shape[1] % num_blocks == 0 and block_product.covers(weight.shape[1] // num_blocks)
