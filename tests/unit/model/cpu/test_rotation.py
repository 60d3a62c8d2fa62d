"""The fast rotation against the matrix that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from microturn.model.cpu.rotation import block_of, rotate
from support.rounded import rotated


def hadamard(size: int) -> Tensor:
    """Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def by_kernel(x: Tensor) -> Tensor:
    out = torch.full_like(x, float("nan"))
    rotate(x.numpy(), out.numpy())
    return out


@pytest.mark.parametrize(
    ("width", "block"), [(1, 1), (30, 2), (8, 8), (48, 16), (32, 32), (192, 64), (384, 128), (576, 64), (1536, 512)]
)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_each_block_is_multiplied_by_its_matrix(width: int, block: int, num_rows: int) -> None:
    assert block_of(width) == block
    x = torch.randn(num_rows, width)
    expected = (x.double().view(num_rows, width // block, block) @ hadamard(block)).reshape(num_rows, width)
    torch.testing.assert_close(by_kernel(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(by_kernel(x), rotated(x))


def test_twice_it_multiplies_by_the_length_of_a_block() -> None:
    x = torch.randint(-9, 10, (3, 192)).float()
    assert torch.equal(by_kernel(by_kernel(x)), 64 * x)
