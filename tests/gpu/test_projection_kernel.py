"""The kernel between projection and attention, compiled: as it is interpreted in tests/unit."""

from __future__ import annotations

import pytest
import torch

from support import projections


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("case", projections.CASES, ids=str)
def test_heads_and_pages_are_those_of_torch(case: projections.Case, num_tokens: int, gpu: torch.device) -> None:
    if case.kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("this GPU converts no float8")
    projections.check(case, gpu, num_tokens)


def test_numbers_beyond_float8_become_its_largest(gpu: torch.device) -> None:
    if torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("this GPU converts no float8")
    projections.check(projections.Case(4, 2, 64, kv_dtype=torch.float8_e4m3fn), gpu, factor=300.0)
