"""Checkpoints whose weights are 8-bit floats (e4m3) times scales: of all, of each row, or of each block.

The layouts are those of DeepSeek-V3 and Qwen3-FP8 (https://github.com/deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`), of
FBGEMM (transformers, `integrations/fbgemm_fp8.py`) and of NVIDIA's Model Optimizer
(https://github.com/NVIDIA/Model-Optimizer, `export/quant_utils.py`). compressed-tensors has them among others.

Scales of activations, static ones too, are not read: products measure a scale for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from microturn.zoo.quantized_format import Format, Stored, demand, scaled, spread

FLOAT8 = "F8_E4M3"
SCALES = frozenset({"weight_scale", "weight_scale_inv"})
_PARTS = SCALES | {"weight"}
# Types of scales by their names in safetensors files; bytes could be exponents, or anything.
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# Model Optimizer's algorithms, and their blocks.
_MODELOPT_BLOCKS = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128)}


def fp8(config: Mapping[str, Any]) -> Format:
    """DeepSeek's and AutoFP8's: a scale for each block, or one for all; both names of it multiply."""
    size = config.get("weight_block_size")
    demand(size is None or _is_size(size), f"FP8 in blocks of {size}")
    return _float8(None if size is None else tuple(size))


def fbgemm_fp8(config: Mapping[str, Any]) -> Format:  # noqa: ARG001  it has one variant
    """FBGEMM's: a scale for each row."""
    return _float8(None)


def modelopt(config: Mapping[str, Any]) -> Format:
    """Model Optimizer's: a scale for all, each row, or each block."""
    algorithm = str(config.get("quant_algo")).upper()
    demand(algorithm in _MODELOPT_BLOCKS, f"Model Optimizer's {config.get('quant_algo')}")
    return _float8(_MODELOPT_BLOCKS[algorithm])


def row_scales(parts: Mapping[str, Tensor], block: tuple[int, int] | None) -> Tensor:
    """The scales of a float8 weight for each of its rows, float32 [out, blocks of inputs]."""
    num_rows = len(parts["weight"])
    scale = _flat(_scale_of(parts))
    return spread(scale, torch.Size([num_rows, scale.shape[1]]), block).expand(num_rows, -1)


def row_scales_shape(parts: Mapping[str, Stored], block: tuple[int, int] | None) -> list[int] | None:
    """Their shape; None for a weight that is no float8, or whose inputs are no whole blocks of neighbours.

    Errors:
        ValueError: see `check_scale`.
    """
    if "weight" not in parts or parts["weight"].get_dtype() != FLOAT8 or "weight_g_idx" in parts:
        return None
    check_scale(parts, block)
    (num_rows, num_inputs), num_blocks = parts["weight"].get_shape(), _matrix(_scale_of(parts).get_shape())[1]
    is_even = num_inputs % num_blocks == 0 and (block is None or num_blocks == 1 or num_inputs % block[1] == 0)
    return [num_rows, num_blocks] if is_even else None


def check_scale(parts: Mapping[str, Stored], block: tuple[int, int] | None) -> None:
    """Looks whether the scales of a weight can be its scales.

    Errors:
        ValueError: they are of another type or shape.
    """
    weight, scale = parts["weight"].get_shape(), _scale_of(parts)
    if scale.get_dtype() not in _SCALE_DTYPES:
        raise ValueError(f"scales are of the type {scale.get_dtype()}, and nothing says what that means")
    sizes, nums = list(weight), _matrix(scale.get_shape())
    if len(sizes) != 2 or len(nums) != 2 or not all(map(_fits, sizes, nums, block or (None, None))):
        raise ValueError(f"scales of the shape {scale.get_shape()} do not fit a weight of the shape {weight}")


def _fits(size: int, num_blocks: int, block_len: int | None) -> bool:
    """Whether a side of a weight may have so many scales."""
    if num_blocks in (1, size) or block_len is None:
        return num_blocks > 0 and size % num_blocks == 0
    return num_blocks == -(-size // block_len)


def _float8(block: tuple[int, int] | None) -> Format:
    def shape(parts: Mapping[str, Stored]) -> list[int]:
        check_scale(parts, block)
        of_weight: list[int] = parts["weight"].get_shape()
        return of_weight

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        return scaled(parts["weight"], None, spread(_flat(_scale_of(parts)), parts["weight"].shape, block))

    return Format(SCALES, _PARTS, shape, values, block)


def _scale_of(parts: Mapping[str, Any]) -> Any:
    return parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]


def _flat(scale: Tensor) -> Tensor:
    """Scales as a matrix."""
    return scale.float().reshape(_matrix(list(scale.shape)))


def _matrix(shape: list[int]) -> list[int]:
    """The shape of scales as that of a matrix: Model Optimizer's blocks have an axis of one element behind each."""
    if len(shape) == 4:
        return [shape[0], shape[2]]
    return [*shape, *(1,) * (2 - len(shape))]


def _is_size(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(isinstance(of, int) and of > 0 for of in size)
