"""Compiles the kernels of 8-bit floats for GPUs that are not there, and says for which there is machine code.

A program of its own: in tests Triton interprets kernels.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from microturn.model.gpu.block_product import _multiply
from microturn.model.gpu.float8_kernel import _quantize

_SHARED_BYTES = {89: 99 << 10, 90: 227 << 10}  # of a program, at most

_OF_PRODUCT = {
    "x": "*fp8e4nv",
    "x_scales": "*fp32",
    "weight": "*fp8e4nv",
    "weight_scales": "*fp32",
    "bias": "*bf16",
    "out": "*bf16",
    "num_rows": "i32",
    "num_out": "i32",
}
_OF_ROUNDING = {
    "x": "*bf16",
    "numbers": "*fp8e4nv",
    "scales": "*fp32",
    "block": "i32",
    "largest": "fp32",
    "least_scale": "fp32",
}


def main() -> None:
    for capability in _SHARED_BYTES:
        for outputs in (32, 128):
            sizes = {"NUM_BLOCKS": 32, "BLOCK": 128, "ROWS": 64, "OUTPUTS": outputs}
            compile_for(capability, _multiply, _OF_PRODUCT, sizes, num_warps=4, num_stages=4)
        for size in (128, 32768):
            compile_for(capability, _quantize, _OF_ROUNDING, {"SIZE": size}, num_warps=min(16, size // 128))


def compile_for(capability: int, kernel: Any, types: dict[str, str], constants: dict[str, int], **options: int) -> None:
    signature = types | dict.fromkeys(constants, "constexpr")
    # Memory that torch allocates, and sizes that are multiples of 16; the number of rows is any.
    is_aligned = {name: of.startswith("*") or (of == "i32" and name != "num_rows") for name, of in types.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(types) if is_aligned[name]}
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= _SHARED_BYTES[capability]
    assert len(compiled.asm["cubin"]) > 0
    print(capability, kernel.__name__, *constants.values())


if __name__ == "__main__":
    main()
