"""A batch that has been packed, sent and unpacked is the same, but for its tokens."""

from __future__ import annotations

import pickle

import numpy as np

from microturn.model.batch import UNKNOWN_IDS, Batch, Row, RowPages
from microturn.model.parallel.packed_batch import PackedBatch


def test_rows_are_the_same_but_for_their_tokens() -> None:
    others = [RowPages([9, 8], 16, 32), RowPages(np.array([7], np.int32))]
    batch = Batch(
        [
            Row([5, 6, 7], 100, [1, 2, 3], wants_logits=False, others=others),
            Row(UNKNOWN_IDS, 40, np.array([4, 5, 6], np.int32), num_drafts=2, num_sinks=16, num_evicted=64),
            Row([1], 0, [0]),
        ]
    )
    got = pickle.loads(pickle.dumps(PackedBatch.of(batch))).unpacked()
    assert got.lengths.tolist() == batch.lengths.tolist() == [3, 1, 1]
    for row, expected in zip(got.rows, batch.rows, strict=True):
        assert list(row.pages) == list(expected.pages)
        assert [(list(of.pages), *of[1:]) for of in row.others] == [(list(of.pages), *of[1:]) for of in expected.others]
        left_out = {"token_ids": (), "pages": (), "others": ()}
        assert row._replace(**left_out) == expected._replace(**left_out)
