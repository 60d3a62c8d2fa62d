"""The product of integers against torch's in float64, which is exact, over whole and part tiles and panels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numba
import pytest
import torch
from torch import Tensor

from microturn.model.cpu import amx_kernels, amx_products, int8_kernels
from microturn.model.cpu.int8_products import PANEL, PANELS_AT_ONCE, STEP, in_panels, most_steps
from microturn.model.cpu.vectors import CPU_FEATURES

Kernel = Callable[..., None]

OUT_STEP = PANELS_AT_ONCE * PANEL


@pytest.fixture(params=["vectors", "amx"])
def round_and_multiply(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "vectors":
        return int8_kernels.round_and_multiply
    if not amx_products.is_available():
        pytest.skip("this CPU has no AMX")
    return partial(amx_kernels.round_and_multiply, num_threads=numba.get_num_threads())


def product(kernel: Kernel, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Of integers [rows, in] and [out, in] with scales; each row of x holds `most_steps` and has a power of two."""
    num_out, width = weight.shape
    out = torch.full((len(x), num_out), float("nan"))
    given = (x * x_scales[:, None]).numpy(), most_steps(width), in_panels(weight).contiguous().numpy()
    padded_scales = torch.cat((weight_scales, torch.ones(-num_out % OUT_STEP)))
    kernel(*given, padded_scales.numpy(), out.numpy())
    return out


def expected(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    sums = (x.double() @ weight.double().t()).float()
    return sums * weight_scales * x_scales[:, None]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 11, 16, 17, 35])
@pytest.mark.parametrize(
    ("num_out", "width"), [(1, STEP), (7, 5), (PANEL + 1, STEP + 1), (OUT_STEP + 3, 64), (960, 576), (12, 8192)]
)
def test_the_product_is_exact(round_and_multiply: Kernel, num_rows: int, num_out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    most = most_steps(width)
    x = torch.randint(-most, most + 1, (num_rows, width), generator=generator)
    x[:, width // 2] = most
    given = (
        x,
        2.0 ** torch.randint(-20, 20, (num_rows,), generator=generator),
        torch.randint(-127, 128, (num_out, width), dtype=torch.int8, generator=generator),
        torch.rand(num_out, generator=generator),
    )
    assert torch.equal(product(round_and_multiply, *given), expected(*given))


@pytest.mark.parametrize("width", [1, STEP, 576, 1536, 4096])
@pytest.mark.parametrize("sign", [-1, 1])
def test_nothing_saturates_and_no_sum_overflows(round_and_multiply: Kernel, width: int, sign: int) -> None:
    """All elements are as large as they may be: sums of pairs pass 16 bits, those of a row come near 32."""
    x = torch.full((5, width), sign * most_steps(width))
    weight = torch.full((PANEL, width), 127, dtype=torch.int8)
    weight[1] = -127
    given = (x, torch.ones(5), weight, torch.ones(PANEL))
    assert torch.equal(product(round_and_multiply, *given), expected(*given))


@pytest.mark.parametrize("num_rows", [2, 18])
def test_only_the_rows_and_columns_that_there_are_are_written(round_and_multiply: Kernel, num_rows: int) -> None:
    out = torch.full((num_rows + 1, 7), 5.0)
    weight = in_panels(torch.ones(7, STEP, dtype=torch.int8)).contiguous().numpy()
    scales = torch.ones(OUT_STEP).numpy()
    round_and_multiply(torch.ones(num_rows, STEP).numpy(), 100, weight, scales, out[:num_rows].numpy())
    assert torch.allclose(out[:num_rows], torch.tensor(float(STEP)))
    assert (out[num_rows] == 5).all()


WITHOUT_AMX = """
import torch
from microturn.model.cpu import amx_products
from microturn.model.cpu.int8_linear import Int8Linear
module = torch.nn.Linear(64, 48).requires_grad_(False)
x = torch.randn(40, 64)
torch.testing.assert_close(Int8Linear.of(module)(x, torch.empty(40, 48)), module(x), atol=0.02, rtol=0)
print(amx_products.is_available())
"""


def test_a_cpu_without_amx_multiplies_many_rows_as_well() -> None:
    """No code for it may be made there: LLVM would end the process."""
    features = ",".join(sorted(CPU_FEATURES - {"+amx-tile", "+amx-int8", "+amx-bf16"}))
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", WITHOUT_AMX], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
