"""How checkpoints hold quantized weights, and what they mean: one `Format` for each `quant_method`.

A quantized module has several tensors, here its parts, named by what follows its name. The layouts are those of
AutoGPTQ (https://github.com/AutoGPTQ/AutoGPTQ, `qlinear_cuda.py`), AutoAWQ (https://github.com/casper-hansen/AutoAWQ,
`packing_utils.py`), compressed-tensors (https://github.com/vllm-project/compressed-tensors, `compressors/`) and those
of `float8_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from microturn.errors import InvalidArgument
from microturn.zoo.float8_formats import check_scale, fbgemm_fp8, fp8, modelopt
from microturn.zoo.quantized_format import Format, Stored, demand, scaled, spread

# Of activations, which are not rounded by these, and of KV (see `kv_scales`).
IGNORED = frozenset(
    f"{what}_{kind}"
    for what in ("input", "output", "activation", "q", "k", "v", "kv")
    for kind in ("scale", "scale_ub", "zero_point", "global_scale")
)
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the columns 0 to 7 are
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def find_format(config: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` names.

    Errors:
        InvalidArgument: an unknown method, or an unknown variant of a known one.
    """
    method = str(config.get("quant_method"))
    if method not in _FORMATS:
        raise InvalidArgument(
            f"weights quantized with {method} are not supported, those of {', '.join(_FORMATS)} are: "
            "give another checkpoint of the model"
        )
    return _FORMATS[method](config)


def _gptq(config: Mapping[str, Any]) -> Format:
    """Columns of a word are along the inputs, of the zero points along the outputs; lowest bits first.

    A symmetric zero point is the middle: some files name the format that stores it less one, and store it as it is.
    """
    layout = config.get("checkpoint_format") or "gptq"
    demand(layout in ("gptq", "gptq_v2"), f"GPTQ's layout {layout}")
    is_symmetric, stored_less = bool(config.get("sym", True)), int(layout == "gptq")

    def shape(parts: Mapping[str, Stored]) -> list[int]:
        num_outputs = parts["scales"].get_shape()[1]
        bits = _word_bits(num_outputs, parts["qzeros"].get_shape()[1])
        return [num_outputs, parts["qweight"].get_shape()[0] * 32 // bits]

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        scales = parts["scales"]
        bits = _word_bits(scales.shape[1], parts["qzeros"].shape[1])
        steps = _unpack(parts["qweight"].t(), bits)
        zeros = _unpack(parts["qzeros"], bits) + stored_less & (1 << bits) - 1
        if is_symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        group = parts.get("g_idx", torch.arange(steps.shape[1]) // -(-steps.shape[1] // len(scales)))
        return scaled(steps, zeros.t()[:, group], scales.t()[:, group])

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    return Format(frozenset({"qweight"}), parts, shape, values)


def _awq(config: Mapping[str, Any]) -> Format:
    """Words hold eight outputs in an order of their own, the weights' and the zero points' alike."""
    variant = str(config.get("version", "gemm")).lower()
    demand(variant == "gemm" and config.get("bits", config.get("w_bit", 4)) == 4, f"AWQ's {variant} of other bits")

    def unpack(words: Tensor) -> Tensor:
        return _unpack(words, 4).view(len(words), -1, 8)[:, :, _AWQ_ORDER].flatten(1)

    def shape(parts: Mapping[str, Stored]) -> list[int]:
        num_inputs, num_words = parts["qweight"].get_shape()
        return [num_words * 8, num_inputs]

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        steps = unpack(parts["qweight"])
        group = torch.arange(len(steps)) // (len(steps) // len(parts["scales"]))
        return scaled(steps, unpack(parts["qzeros"])[group], parts["scales"][group]).t()

    return Format(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales"}), shape, values)


def _compressed_tensors(config: Mapping[str, Any]) -> Format:
    """8-bit weights as they are, 4-bit ones packed with an offset; a scale for all, each row, group or block."""
    groups = config.get("config_groups", {}).values()
    layouts = {group.get("format") or config.get("format") for group in groups}
    sparsity = config.get("sparsity_config") or {}
    demand(layouts <= {*_COMPRESSED}, f"compressed-tensors' {', '.join(sorted(map(str, layouts - {*_COMPRESSED})))}")
    demand(sparsity.get("format", "dense") == "dense", "compressed-tensors' sparse weights")
    demand(not config.get("transform_config"), "compressed-tensors' transforms")
    sizes = (args["block_structure"] for args in _weight_args(groups) if args.get("block_structure"))
    block = next(((size[0], size[1]) for size in sizes), None)

    def shape(parts: Mapping[str, Stored]) -> list[int]:
        if "weight_packed" not in parts:
            check_scale(parts, block)
        of: list[int] = parts["weight_shape"][...].tolist() if "weight_packed" in parts else parts["weight"].get_shape()
        return of

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        steps, scale, zeros = parts.get("weight"), parts["weight_scale"], parts.get("weight_zero_point")
        if steps is None:
            num_outputs, num_inputs = parts["weight_shape"].tolist()
            bits = _word_bits(num_inputs, parts["weight_packed"].shape[1])
            steps = _unpack(parts["weight_packed"], bits)[:, :num_inputs]
            # Without a zero point the offset is the middle; a packed zero point has the same offset as the weights.
            zeros = torch.tensor(1 << bits - 1) if zeros is None else _unpack(zeros.t(), bits)[:, :num_outputs].t()
        if "weight_g_idx" in parts:
            group = parts["weight_g_idx"]
            scale, zeros = scale[:, group], zeros if zeros is None or zeros.dim() == 0 else zeros[:, group]
        zeros = None if zeros is None else spread(zeros, steps.shape, block)
        return scaled(steps, zeros, spread(scale, steps.shape, block))

    parts = {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    return Format(frozenset({"weight_scale"}), frozenset(parts), shape, values, block)


_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "compressed-tensors": _compressed_tensors,
}


def _weight_args(groups: Any) -> list[Mapping[str, Any]]:
    return [group["weights"] for group in groups if group.get("weights")]


def _word_bits(num_values: int, num_words: int) -> int:
    """The bits of a value, 4 or 8, from the 32-bit words that a row takes."""
    bits = 32 * num_words // num_values
    demand(bits in (4, 8), f"words of {bits} bits")
    return bits


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unsigned values, uint8 [rows, n * 32 / bits], lowest bits first, of int32 words [rows, n]."""
    columns = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(columns, 2).flatten(1)
