"""Products of 8-bit floats on a real GPU, by torch and by the kernel for blocks, and a model that has them."""

from __future__ import annotations

import pytest
import torch

from microturn.model.batch import Batch, Row
from microturn.model.gpu import float8, float8_kernel, float8_linear
from microturn.model.gpu.float8_linear import Float8Linear
from microturn.model.gpu.loading import make_ready
from microturn.settings import Settings
from support import float8_products, models

FEW = {"kv_tokens": 4096, "max_context": 512, "max_sessions": 16, "max_batch_tokens": 256}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.06}


@pytest.fixture(autouse=True)
def _with_float8(gpu: torch.device) -> None:
    if reason := float8_linear.unavailable_reason(gpu):
        pytest.skip(reason)


@pytest.mark.parametrize("case", float8_products.CASES, ids=str)
def test_a_product_is_that_of_the_numbers(case: float8_products.Case, gpu: torch.device) -> None:
    float8_products.check(case, gpu, torch.bfloat16)


@pytest.mark.parametrize("block", [128, 4096, 14336])
def test_the_kernel_rounds_as_torch_does_to_the_bit(block: int, gpu: torch.device) -> None:
    x = torch.randn(33, 114688, generator=torch.Generator(gpu).manual_seed(1), device=gpu).bfloat16()[:, : 7 * block]
    for got, expected in zip(float8_kernel.quantize(x.contiguous(), block), float8.quantize(x, block), strict=True):
        assert torch.equal(got.float(), expected.float())


def test_blocks_give_a_row_the_same_bits_whatever_is_beside_it(gpu: torch.device) -> None:
    generator = torch.Generator(gpu).manual_seed(0)
    x, weight = (torch.randn(size, 4096, generator=generator, device=gpu) for size in (300, 1024))
    product = Float8Linear(*float8.quantize(weight, 128), None)
    x = x.bfloat16()
    many = product(x, x.new_empty(300, 1024))
    for num_rows in (1, 8, 64, 65, 200):
        assert torch.equal(product(x[:num_rows], x.new_empty(num_rows, 1024)), many[:num_rows])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_is_served_with_them_from_graphs(family: str) -> None:
    plain, rounded = (
        make_ready(models.with_served_heads(family, **SHAPE).cuda(), Settings(**FEW, weights=weights))
        for weights in ("bfloat16", "float8")
    )
    assert (rounded.weights, rounded.attention) == ("float8", "flashinfer")
    assert rounded.runner.has_graphs
    assert rounded.weight_bytes < plain.weight_bytes
    step = Batch([Row(list(range(20)), 0, [3, 1])])
    got, expected = rounded.runner.run(step).clone(), plain.runner.run(step)
    assert 0 < (got - expected).norm() < 0.3 * expected.norm()
