"""Which keys the blocks of FlashInfer's attention kernel read by a plan, and where they write: its arithmetic in numpy.

As in `BatchPrefillWithPagedKVCacheDevice` of its prefill.cuh, whose names are in parentheses.
"""

from __future__ import annotations

import numpy as np

from support.flashinfer_planner import Planned

_BYTES_OF_RESULT = 2  # partial results have the type of queries


def assert_covered_once(plan: Planned) -> None:
    """Each query sees all keys that it is to see, each of them once, and partial results lie apart in the workspace."""
    info, starts, num_queries = plan.info, plan.query_indptr, np.diff(plan.query_indptr)
    num_rows = len(num_queries)
    rows, tiles, chunks = (plan.ints(at, info.num_blocks) for at in (info.rows_at, info.query_tiles_at, info.chunks_at))
    if info.is_captured:
        assert info.is_split, "a captured pass has partial results, and a kernel that merges them"
        (num_tokens,) = plan.ints(info.num_tokens_at, 1)
        assert num_tokens == starts[-1] <= info.max_tokens
        is_valid = plan.memory[info.is_valid_at : info.is_valid_at + info.num_blocks].astype(bool)
        rows, tiles, chunks = rows[is_valid], tiles[is_valid], chunks[is_valid]

    # Which blocks there are: for each tile of a row's queries, all chunks of its keys (`num_kv_chunks`).
    (chunk_size,) = plan.ints(info.chunk_size_at, 1)
    window_left = np.where(plan.window_left < 0, plan.kv_lens, plan.window_left)
    seen = np.minimum(np.maximum(plan.kv_lens, 1), window_left + info.tile)
    nums_chunks = -(-seen // chunk_size) if info.is_split else np.ones(num_rows, np.int32)
    nums_tiles = -(-num_queries * plan.group_size // info.tile)
    blocks = sorted(zip(rows.tolist(), tiles.tolist(), chunks.tolist(), strict=True))
    expected = [
        (row, tile, chunk)
        for row, (num_tiles, num_chunks) in enumerate(zip(nums_tiles, nums_chunks, strict=True))
        for tile in range(num_tiles)
        for chunk in range(num_chunks)
    ]
    assert blocks == expected, "each tile of queries meets each chunk of keys once"

    # What its chunks hold together, from the first key (`kv_start_idx`) on: all that its queries see.
    first = tiles * info.tile // plan.group_size
    last = np.minimum(num_queries[rows], -(-(tiles + 1) * info.tile // plan.group_size)) - 1
    num_before = plan.kv_lens[rows] - num_queries[rows]
    begin = np.maximum(num_before + first - window_left[rows], 0)
    end = plan.kv_lens[rows]
    if info.is_split:
        end = np.minimum(begin + nums_chunks[rows] * chunk_size, end)
    assert (end > num_before + last).all(), "the last query of a tile sees its own key"

    # Where results go, and what is merged for a token (`o_indptr`, `merge_indptr`).
    out_indptr = plan.ints(info.out_indptr_at, num_rows + 1)
    if not info.is_split:
        assert (out_indptr == starts).all()
        return
    merge_indptr = plan.ints(info.merge_indptr_at, starts[-1] + 1)
    assert (np.diff(merge_indptr) == np.repeat(nums_chunks, num_queries)).all(), "all results of a token are merged"
    assert (out_indptr == merge_indptr[starts]).all(), "results are merged where they were written"
    num_results = plan.num_heads * int(merge_indptr[-1])
    assert info.partial_results_at + num_results * plan.head_dim * _BYTES_OF_RESULT <= info.partial_weights_at
    assert info.partial_weights_at + num_results * 4 <= plan.workspace_bytes
