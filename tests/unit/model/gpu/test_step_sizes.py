"""Which passes are captured, which one a step is replayed by, and the tile that FlashInfer has in it."""

from __future__ import annotations

import pytest
import torch

from microturn.kv.layer_groups import LayerShape
from microturn.model.batch import Batch, Row
from microturn.model.gpu.flashinfer_attention import AttentionShape
from microturn.model.gpu.graphs import StepSize, best_size, step_sizes


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape([LayerShape(num_kv_heads, head_dim)], [None], num_heads, torch.bfloat16, None)


LLAMA = shape(32, 8, 128)


def batch_of(*lengths: int) -> Batch:
    return Batch([Row([0] * length, 0, [0]) for length in lengths])


def tile_of(size: StepSize, of: AttentionShape = LLAMA) -> int:
    (heads,) = of.heads
    return size.tile(*heads)


@pytest.mark.parametrize("max_rows", [64, 256])
def test_every_small_step_is_held_with_little_padding(max_rows: int) -> None:
    sizes = step_sizes(max_rows, 2048, LLAMA)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes) < 90
    assert (sizes[0].num_tokens, sizes[0].num_rows) == (512, max_rows), "no pass takes more memory than the first"
    for num_tokens in range(1, 513):
        num_rows = min(num_tokens, max_rows)
        size = best_size(sizes, batch_of(num_tokens - num_rows + 1, *[1] * (num_rows - 1)), LLAMA)
        assert size is not None
        assert num_tokens <= size.num_tokens <= max(num_tokens + 1, 1.5 * num_tokens)
    assert best_size(sizes, batch_of(*[2] * 257), LLAMA) is None


def test_there_are_no_more_tokens_and_rows_than_settings_allow() -> None:
    sizes = step_sizes(8, 40, LLAMA)
    assert max(size.num_tokens for size in sizes) == 40
    assert max(size.num_rows for size in sizes) == 8
    assert all(size.num_rows <= size.num_planned <= size.num_tokens for size in sizes)


@pytest.mark.parametrize(
    ("lengths", "tile"),
    [
        ([1] * 200, 16),
        ([4] * 64, 16),
        ([5] * 48, 64),
        ([1] * 40 + [16] * 3, 64),
        ([16] * 12, 64),
        ([120] * 2, 128),
        ([1] * 3 + [250], 128),
        ([5] * 64, 64),
        ([8] * 64, 128),  # a tile of 64 would need more than the workspace
        ([1, 7], 64),
        ([512], 128),
    ],
    ids=str,
)
def test_rows_have_the_tile_with_which_attention_takes_least(lengths: list[int], tile: int) -> None:
    size = best_size(step_sizes(64 if len(lengths) <= 64 else 256, 2048, LLAMA), batch_of(*lengths), LLAMA)
    assert size is not None
    assert tile_of(size) == tile


@pytest.mark.parametrize(
    "of", [LLAMA, shape(32, 8, 64), shape(64, 8, 128), shape(28, 4, 128), shape(8, 4, 256), shape(16, 1, 128)]
)
def test_no_pass_needs_more_than_the_workspace_and_each_step_has_a_small_tile(of: AttentionShape) -> None:
    sizes = step_sizes(256, 2048, of)
    assert all(size.partial_bytes(of) <= of.workspace_bytes for size in sizes)
    for num_rows in range(1, 257):
        size = best_size(sizes, batch_of(*[1] * num_rows), of)
        assert size is not None
        assert tile_of(size, of) == 16


def test_tiles_are_those_of_flashinfer() -> None:
    """By hand from its scheduler: the longest row of so many tokens and rows, times the query heads of a key head."""
    assert [StepSize(n, 1, planned).tile(4, 128) for n, planned in ((9, 9), (9, 6), (9, 5), (80, 65), (80, 64))] == [
        16,
        16,
        64,
        64,
        128,
    ]
    assert StepSize(80, 1, 1).tile(4, 256) == 64
    assert StepSize(4, 4, 4).tile(32, 128) == 64
