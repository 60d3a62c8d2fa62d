"""Projections of layers for tests of `model.gpu.projection_kernel`, on a GPU or interpreted on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

from microturn.kv.layer_groups import LayerShape
from microturn.kv.layer_pages import LayerPages
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from microturn.model.gpu import projection_kernel
from microturn.model.gpu.glue import Projection, split_heads
from support.recorded_graphs import kernel

NUM_PAGES, PAGE_SIZE = 20, 16


@kernel
def plain_append(projection: Projection, pages: LayerPages, places: Tensor) -> Tensor:
    """What the kernel computes, in torch: much faster than it is interpreted."""
    q, k, v = split_heads(projection)
    pages.put(*places[: len(q)].unbind(1), k, v)
    return q


def install_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `plain_append` in the kernel's place."""
    monkeypatch.setattr(projection_kernel, "append_projection", plain_append)


def let_interpreter_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has numbers rounded as on a GPU: the interpreter's own conversion loses what is carried into an exponent."""
    original = interpreter._convert_float

    def convert(given: NDArray[Any], from_type: Any, to_type: Any, rounding: Any) -> NDArray[Any]:
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
        if from_type.name != "fp32" or to_type.name not in types:
            return original(given, from_type, to_type, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(given).view(np.float32)).to(types[to_type.name])
        bits = torch.uint8 if rounded.itemsize == 1 else torch.int16
        return rounded.view(bits).numpy().view(np.uint8 if rounded.itemsize == 1 else np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pairs: int | None = None  # those of whole heads
    is_interleaved: bool = False
    has_norms: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads = f"{self.num_heads}-{self.num_kv_heads}-{self.head_dim}"
        pairs = "all" if self.num_pairs is None else self.num_pairs
        order = "interleaved" if self.is_interleaved else "halves"
        norms = "norms" if self.has_norms else "plain"
        return f"{heads} {pairs} {order} {norms} {self.dtype} {self.kv_dtype}".replace("torch.", "")


CASES = [
    Case(32, 8, 128),
    Case(32, 8, 64),
    Case(16, 8, 128, has_norms=True),
    Case(16, 8, 128, has_norms=True, is_interleaved=True),
    Case(8, 4, 256, has_norms=True, kv_dtype=torch.float8_e4m3fn),
    Case(32, 8, 128, kv_dtype=torch.float8_e4m3fn),
    Case(28, 4, 128),
    Case(9, 3, 64, kv_dtype=torch.float8_e4m3fn),
    Case(4, 1, 64, has_norms=True),
    Case(8, 2, 128, 32, is_interleaved=True),
    Case(8, 2, 128, 32),
    Case(8, 2, 128, 48),
    Case(8, 2, 128, 5, has_norms=True),
    Case(8, 2, 128, 5, has_norms=True, is_interleaved=True),
    Case(8, 2, 64, 0),
    Case(8, 2, 64, 0, has_norms=True, is_interleaved=True),
    Case(8, 2, 64, dtype=torch.float16, kv_dtype=torch.float16),
    Case(8, 2, 64, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn),
    Case(8, 2, 64, has_norms=True, dtype=torch.float32, kv_dtype=torch.float32),
    Case(8, 2, 64, dtype=torch.float32, kv_dtype=torch.bfloat16),
    Case(8, 2, 64, kv_dtype=torch.float32),
]


def check(case: Case, device: torch.device, num_tokens: int = 5, factor: float = 1.0) -> None:
    """Compares queries and whole tensors of pages with those of torch: equal but for one rounding."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = case.num_heads, case.num_kv_heads
    qkv = factor * torch.randn(num_tokens, heads + 2 * kv_heads, case.head_dim, generator=generator)
    num_pairs = case.head_dim // 2 if case.num_pairs is None else case.num_pairs
    angles = 10 * torch.randn(num_tokens, num_pairs, generator=generator)
    norms = [(torch.randn(case.head_dim, generator=generator).to(device), 1e-5) for _ in range(2)]
    q_norm, k_norm = norms if case.has_norms else (None, None)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    given = qkv.to(device, case.dtype)
    of = Projection(given, q_norm, k_norm, (cos, sin, case.is_interleaved), heads, kv_heads)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, generator=generator)[:num_tokens]
    places = torch.stack((slots // PAGE_SIZE, slots % PAGE_SIZE), dim=1).to(device)
    pages, expected_pages = (_pages(case, device) for _ in range(2))
    assert projection_kernel.covers(of, pages)
    expected = plain_append(of, expected_pages, places)
    got = projection_kernel.append_projection(of, pages, places)
    assert got.shape == expected.shape
    assert got.dtype == case.dtype
    assert got.is_contiguous()
    _assert_close(got, expected, case.has_norms)
    _assert_close(pages.elements[:, 0], expected_pages.elements[:, 0], case.has_norms)
    assert torch.equal(pages.elements[:, 1].float(), expected_pages.elements[:, 1].float()), "values are not computed"


def _pages(case: Case, device: torch.device) -> LayerPages:
    float8 = [LayerScales(0.3, 1.7)] if case.kv_dtype == torch.float8_e4m3fn else None
    shape = LayerShape(case.num_kv_heads, case.head_dim)
    (pages,) = KVTensors([shape], NUM_PAGES, PAGE_SIZE, case.kv_dtype, device, float8=float8).layers
    pages.elements.zero_()
    return pages


def _assert_close(got: Tensor, expected: Tensor, has_norms: bool) -> None:
    """Within a step of the type, and 1e-6 for sums; with norms a step more: torch rounds before it turns, too."""
    step = max(1e-6, torch.finfo(got.dtype).eps * (2 if has_norms else 1))
    spread = float(expected.float().abs().max())
    torch.testing.assert_close(got.float(), expected.float(), rtol=step, atol=step * spread / 8)
