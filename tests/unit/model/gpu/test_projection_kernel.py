"""The kernel between projection and attention, interpreted on a CPU, gives what `glue` and the pages give in torch."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.layer_groups import LayerShape
from microturn.kv.tensors import KVTensors
from microturn.model.gpu.glue import Norm, Projection
from microturn.model.gpu.projection_kernel import append_projection, covers
from support import projections

TOKENS, PAGE_SIZE = 5, 4


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    projections.let_interpreter_round(monkeypatch)


@pytest.mark.parametrize("case", projections.CASES, ids=str)
def test_heads_and_pages_are_those_of_torch(case: projections.Case) -> None:
    projections.check(case, torch.device("cpu"))


def test_numbers_beyond_float8_become_its_largest() -> None:
    case = projections.Case(4, 2, 64, kv_dtype=torch.float8_e4m3fn)
    projections.check(case, torch.device("cpu"), factor=300.0)


@pytest.mark.parametrize(
    ("head_dim", "norm", "is_covered"),
    [(64, None, True), (64, 64, True), (96, None, False), (64, 4 * 64, False)],
)
def test_it_says_which_projections_it_computes(head_dim: int, norm: int | None, is_covered: bool) -> None:
    kv = KVTensors([LayerShape(2, head_dim)], 3, PAGE_SIZE)
    of_heads: Norm | None = None if norm is None else (torch.ones(norm), 1e-6)
    angles = torch.ones(TOKENS, head_dim // 2)
    qkv = torch.zeros(TOKENS, 8, head_dim)
    assert covers(Projection(qkv, of_heads, None, (angles, angles, False), 4, 2), kv.layers[0]) == is_covered


def test_no_number_of_tokens_is_too_small() -> None:
    projections.check(projections.Case(4, 2, 64), torch.device("cpu"), num_tokens=1)
    kv = KVTensors([LayerShape(2, 64)], 3, PAGE_SIZE)
    of = Projection(torch.zeros(0, 8, 64), None, None, (torch.zeros(0, 32), torch.zeros(0, 32), False), 4, 2)
    assert append_projection(of, kv.layers[0], torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 4, 64)
