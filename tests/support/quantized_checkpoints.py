"""Writes tiny quantized checkpoints, each weight by the published layout of its format, number by number.

It shares nothing with what reads them: values are chosen here, and packed into words by sums of shifted integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
# Of a weight [out, in], its parts in the file, and the weight that they stand for, in float64.
Quantizer = Callable[[np.ndarray], tuple[Parts, np.ndarray]]

GROUP = 32


@dataclass(frozen=True)
class Kind:
    """A format: what its config says, its quantizer, and the type of the model's other tensors."""

    config: Mapping[str, Any]
    quantize: Quantizer
    dtype: torch.dtype = torch.bfloat16


def write_quantized(plain: Path, quantized: Path, intended: Path, kind: Kind) -> None:
    """Writes a checkpoint with quantized layers, and a plain one of the weights that they stand for.

    Args:
        plain: a model directory with float32 weights.
        quantized: the new directory with quantized weights, in two shards.
        intended: the new plain directory.
    """
    stored: Parts = {}
    meant: Parts = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and "layers." in module:
            parts, values = kind.quantize(weight.double().numpy())
            stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            meant[name] = torch.from_numpy(values).float().to(kind.dtype).contiguous()
        else:
            stored[name] = meant[name] = weight.to(kind.dtype)
    config = json.loads((plain / "config.json").read_text()) | {"dtype": str(kind.dtype).removeprefix("torch.")}
    for directory in (quantized, intended):
        directory.mkdir()
        for path in plain.iterdir():
            if path.suffix != ".safetensors":
                (directory / path.name).write_bytes(path.read_bytes())
        (directory / "config.json").write_text(json.dumps(config))
    save_file(meant, intended / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = dict(kind.config)
    (quantized / "config.json").write_text(json.dumps(config))
    # Parts of one weight are in different shards.
    names = list(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: stored[name] for name in held}, quantized / shard, {"format": "pt"})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _words(values: np.ndarray, bits: int) -> Tensor:
    """Rows of unsigned values as int32 words, the first value in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(values), -(-values.shape[1] // per_word)), np.uint32)
    for row, column in np.ndindex(values.shape):
        words[row, column // per_word] |= np.uint32(int(values[row, column]) << bits * (column % per_word))
    return torch.from_numpy(words.view(np.int32))


def _steps(weight: np.ndarray, group: np.ndarray, bits: int, *, symmetric: bool, dtype: torch.dtype) -> tuple:
    """Unsigned steps [out, in], zero points [out, groups], scales [out, groups] as `dtype` holds them."""
    num_groups = group.max() + 1
    zeros = np.zeros((len(weight), num_groups), int)
    scales = np.zeros((len(weight), num_groups))
    steps = np.zeros(weight.shape, int)
    top = (1 << bits) - 1
    for index in range(num_groups):
        columns = weight[:, group == index]
        low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
        if symmetric:
            low, high = -np.abs(columns).max(1), np.abs(columns).max(1)
        scale = torch.from_numpy((high - low) / top).to(dtype).double().numpy()
        zero = np.full(len(weight), 1 << bits - 1) if symmetric else np.clip(np.round(-low / scale), 0, top).astype(int)
        steps[:, group == index] = np.clip(np.round(columns / scale[:, None]) + zero[:, None], 0, top)
        zeros[:, index], scales[:, index] = zero, scale
    return steps, zeros, scales


def gptq(
    bits: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    layout: str = "gptq",
    less: int = 1,
    g_idx: bool = True,
) -> Kind:
    """AutoGPTQ's: words along the inputs, zero points less one."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.arange(weight.shape[1]) // GROUP
        if act_order:
            group = np.random.default_rng(2).permutation(group)
        steps, zeros, scales = _steps(weight, group, bits, symmetric=symmetric, dtype=torch.float16)
        parts = {
            "qweight": _words(steps, bits).t(),
            "qzeros": _words((zeros.T - less) % (1 << bits), bits),
            "scales": torch.from_numpy(scales.T).half(),
            "g_idx": torch.from_numpy(group).int(),
        }
        if not g_idx:
            del parts["g_idx"]
        return parts, (steps - zeros[:, group]) * scales[:, group]

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order}
    return Kind(config | {"checkpoint_format": layout}, quantize, torch.float16)


def awq() -> Kind:
    """AutoAWQ's gemm: words along the outputs, in which column 0, 2, 4, 6, 1, 3, 5, 7 follow each other."""

    def interleaved(values: np.ndarray) -> Tensor:
        return _words(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4)

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.arange(weight.shape[1]) // GROUP
        steps, zeros, scales = _steps(weight, group, 4, symmetric=False, dtype=torch.float16)
        parts = {
            "qweight": interleaved(steps.T),
            "qzeros": interleaved(zeros.T),
            "scales": torch.from_numpy(scales.T).half(),
        }
        return parts, (steps - zeros[:, group]) * scales[:, group]

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Kind(config, quantize, torch.float16)


def _float8(weight: np.ndarray, rows: int, columns: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """FP8 numbers, a float32 scale for each block, and the weight that they stand for."""
    num_blocks = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    numbers, scales, values = np.zeros(weight.shape), np.zeros(num_blocks, np.float32), np.zeros(weight.shape)
    for row, column in np.ndindex(num_blocks):
        block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
        scales[row, column] = np.abs(weight[block]).max() / 448
        rounded = torch.from_numpy(weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
        numbers[block] = rounded.double().numpy()
        values[block] = numbers[block] * scales[row, column]
    return torch.from_numpy(numbers).to(torch.float8_e4m3fn), scales, values


def fp8(block: tuple[int, int] | None, *, scale: str = "weight_scale_inv") -> Kind:
    """DeepSeek's, whose last blocks are cut off, or one scale for all."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        numbers, scales, values = _float8(weight, *(block or weight.shape))
        parts = {"weight": numbers, scale: torch.from_numpy(scales if block else scales.reshape(()))}
        return parts | ({} if block else {"activation_scale": torch.tensor(0.5)}), values

    size = None if block is None else list(block)
    return Kind({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}, quantize)


def fbgemm_fp8() -> Kind:
    """FBGEMM's: a scale for each row, and a bound for those of activations."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        numbers, scales, values = _float8(weight, 1, weight.shape[1])
        bound = torch.tensor([1200.0])
        return {"weight": numbers, "weight_scale": torch.from_numpy(scales), "input_scale_ub": bound}, values

    return Kind({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, quantize)


def modelopt(algorithm: str) -> Kind:
    """Model Optimizer's: a scale for all, for each row, or for blocks with axes of one element between."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rows, columns = {"FP8": weight.shape, "FP8_PER_CHANNEL_PER_TOKEN": (1, weight.shape[1])}.get(
            algorithm, (128, 128)
        )
        numbers, scales, values = _float8(weight, rows, columns)
        num_rows, num_columns = scales.shape
        shape = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (num_rows,)}.get(algorithm, (num_rows, 1, num_columns, 1))
        parts = {"weight": numbers, "weight_scale": torch.from_numpy(scales.reshape(shape))}
        return parts | ({"input_scale": torch.tensor(0.5)} if algorithm == "FP8" else {}), values

    return Kind({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}, quantize)


def _compressed(layout: str, quantize: Quantizer, **weights: Any) -> Kind:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"format": layout, "config_groups": {"group_0": scheme}, "quantization_status": "compressed"}
    return Kind({"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}, quantize)


def compressed_float(strategy: str) -> Kind:
    """compressed-tensors' float-quantized: a scale for all, each row, or each block."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        shape = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (40, 40)}[strategy]
        numbers, scales, values = _float8(weight, *shape)
        flat = scales.reshape(-1) if strategy == "tensor" else scales
        return {"weight": numbers, "weight_scale": torch.from_numpy(flat), "input_scale": torch.tensor([0.5])}, values

    block = [40, 40] if strategy == "block" else None
    return _compressed("float-quantized", quantize, type="float", num_bits=8, strategy=strategy, block_structure=block)


def compressed_int8(*, symmetric: bool) -> Kind:
    """compressed-tensors' int-quantized: signed numbers and a scale for each row."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.zeros(weight.shape[1], int)
        steps, zeros, scales = _steps(weight, group, 8, symmetric=symmetric, dtype=torch.bfloat16)
        parts = {
            "weight": torch.from_numpy(steps - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
        }
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
        return parts, (steps - zeros) * scales

    return _compressed("int-quantized", quantize, type="int", num_bits=8, strategy="channel", symmetric=symmetric)


def compressed_packed(bits: int, *, symmetric: bool, strategy: str = "group", act_order: bool = False) -> Kind:
    """compressed-tensors' pack-quantized: words along the inputs, of the zero points along the outputs."""

    def quantize(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.arange(weight.shape[1]) // (GROUP if strategy == "group" else weight.shape[1])
        if act_order:
            group = np.random.default_rng(2).permutation(group)
        steps, zeros, scales = _steps(weight, group, bits, symmetric=symmetric, dtype=torch.bfloat16)
        parts = {
            "weight_packed": _words(steps, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = _words(zeros.T, bits).t()
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(group).int()
        return parts, (steps - zeros[:, group]) * scales[:, group]

    size = GROUP if strategy == "group" else None
    order = "group" if act_order else None
    asked = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": size, "actorder": order}
    return _compressed("pack-quantized", quantize, type="int", **asked)


KINDS = {
    "gptq 4": gptq(4),
    "gptq 4, the middle stored as it is": gptq(4, less=0),
    "gptq 4, without group indices": gptq(4, g_idx=False),
    "gptq 4, act-order": gptq(4, act_order=True),
    "gptq 4, asymmetric": gptq(4, symmetric=False),
    "gptq 4, asymmetric, act-order": gptq(4, symmetric=False, act_order=True),
    "gptq 8": gptq(8),
    "gptq 8, asymmetric": gptq(8, symmetric=False),
    "gptq_v2 4, asymmetric": gptq(4, symmetric=False, layout="gptq_v2", less=0),
    "awq": awq(),
    "fp8, blocks": fp8((40, 24)),
    "fp8, one scale": fp8(None),
    "fp8, one scale of the other name": fp8(None, scale="weight_scale"),
    "fp8, blocks of 32": fp8((32, 32)),
    "fbgemm_fp8": fbgemm_fp8(),
    "modelopt, one scale": modelopt("FP8"),
    "modelopt, rows": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt, blocks": modelopt("FP8_PB_WO"),
    "compressed-tensors float, tensor": compressed_float("tensor"),
    "compressed-tensors float, channel": compressed_float("channel"),
    "compressed-tensors float, block": compressed_float("block"),
    "compressed-tensors int8": compressed_int8(symmetric=True),
    "compressed-tensors int8, asymmetric": compressed_int8(symmetric=False),
    "compressed-tensors packed 4": compressed_packed(4, symmetric=True),
    "compressed-tensors packed 4, asymmetric": compressed_packed(4, symmetric=False),
    "compressed-tensors packed 4, act-order": compressed_packed(4, symmetric=False, act_order=True),
    "compressed-tensors packed 4, channel": compressed_packed(4, symmetric=True, strategy="channel"),
    "compressed-tensors packed 8": compressed_packed(8, symmetric=True),
}
