"""Products of 8-bit floats against float32 products of what the numbers stand for.

Torch multiplies 8-bit floats on a CPU too, and the kernel for blocks is interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microturn.model.gpu import block_product, float8
from microturn.model.gpu.float8_linear import Float8Linear, Float8Products
from microturn.model.products import TorchLinear
from support import float8_products


@pytest.mark.parametrize("case", float8_products.CASES, ids=str)
def test_a_product_is_that_of_the_numbers(case: float8_products.Case) -> None:
    float8_products.check(case, torch.device("cpu"), torch.float32)


def linears(*nums_out: int, num_in: int = 64, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(3)
    return [nn.Linear(num_in, num_out, bias=bias, dtype=torch.bfloat16) for num_out in nums_out]


def published(modules: list[nn.Linear], block: int) -> dict[nn.Module, Tensor]:
    """Gives modules the weights of 8-bit floats, and returns their scales, which are not what they would be here."""
    scales: dict[nn.Module, Tensor] = {}
    for module in modules:
        numbers, of = float8.quantize(module.weight.detach(), block)
        scales[module] = of * 1.7
        module.weight.data = float8.decode(numbers, scales[module]).to(module.weight.dtype)
    return scales


@pytest.mark.parametrize("block", [64, 32])
def test_published_numbers_are_kept_to_the_bit(block: int) -> None:
    modules = linears(32, 16)
    scales = published(modules, block)
    weights = [module.weight.detach().clone() for module in modules]
    product = Float8Products(scales).fused(modules)
    assert isinstance(product, Float8Linear)
    for module, weight in zip(modules, weights, strict=True):
        assert module.weight.dtype == torch.float8_e4m3fn
        assert module.weight.untyped_storage().data_ptr() == product.weight.untyped_storage().data_ptr()
        assert torch.equal(float8.decode(module.weight, scales[module]).to(torch.bfloat16), weight)


def test_weights_for_which_torch_has_no_product_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As cuBLAS has none of few rows for some, on some GPUs."""
    multiply = torch._scaled_mm
    tried: list[tuple[int, ...]] = []

    def multiply_many(x: Tensor, weight: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
        tried.append(tuple(weight.shape))
        if weight.shape == (64, 48) and len(x) <= 256:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return multiply(x, weight, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", multiply_many)
    products = Float8Products()
    assert [type(products.fused(linears(*sizes))) for sizes in ((48,), (32,), (32, 16), (32,))] == [
        TorchLinear,
        Float8Linear,
        TorchLinear,
        Float8Linear,
    ]
    assert (tried.count((64, 48)), tried.count((64, 32))) == (1, 4)
    assert "weights of 48 by 64 are served without 8-bit floats: " in caplog.text
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in caplog.text


def test_weights_that_a_checkpoint_has_left_as_they_were_stay_so() -> None:
    modules = linears(32, 16)
    scales = published(modules, 64)
    assert isinstance(Float8Products({modules[0]: scales[modules[0]]}).fused(modules), TorchLinear)
    assert {module.weight.dtype for module in modules} == {torch.bfloat16}


@pytest.mark.parametrize(
    "others",
    [
        lambda scales: scales * 1.1,  # of another weight
        lambda scales: scales * torch.nan,
        lambda scales: scales[:-1],
        lambda scales: scales.repeat_interleave(4, 1),  # blocks that no instruction multiplies
    ],
)
def test_scales_that_are_not_a_weight_s_leave_it_as_it_was(others: object) -> None:
    modules = linears(32)
    scales = {module: others(of) for module, of in published(modules, 64).items()}
    assert isinstance(Float8Products(scales).of(modules[0]), TorchLinear)


def test_without_a_checkpoint_s_scales_each_row_is_rounded() -> None:
    modules = linears(32, 16, bias=True)
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = torch.cat([module.bias.detach() for module in modules])
    product = Float8Products().fused(modules)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    got, expected = product(x, x.new_empty(5, 48)).float(), (x @ weight.t() + bias).float()
    assert 0 < (got - expected).norm() < 0.06 * expected.norm()
    assert product.num_bytes == weight.numel() + 4 * len(weight)


def test_weights_whose_sides_cannot_be_multiplied_stay_as_they_were() -> None:
    assert isinstance(Float8Products().of(linears(24)[0]), TorchLinear)
    assert isinstance(Float8Products().of(linears(32, num_in=40)[0]), TorchLinear)


def test_a_row_s_result_does_not_depend_on_those_beside_it() -> None:
    """To the bit, by torch on a CPU and by blocks. On a GPU torch may add up otherwise for other numbers of rows."""
    for block in (64, 32):
        modules = linears(32)
        product = Float8Products(published(modules, block)).of(modules[0])
        x = torch.randn(70, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
        x[1:] *= 1e3
        many = product(x, x.new_empty(70, 32))
        assert torch.equal(product(x[:1], x.new_empty(1, 32)), many[:1])


def test_it_says_which_blocks_it_multiplies() -> None:
    assert [block for block in range(16, 300) if block_product.covers(block)] == [32, 64, 128]


def test_kernels_compile_for_ada_and_hopper(tmp_path: Path) -> None:
    """To machine code, without a GPU, for the types and alignments of a model."""
    program = Path(__file__).parents[3] / "support" / "compile_float8.py"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", program], check=True, env=environment, capture_output=True, text=True
    )
    assert len(told.stdout.splitlines()) == 8
