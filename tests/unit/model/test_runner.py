"""What a pass is told of the tokens of a batch."""

from __future__ import annotations

from microturn.model.batch import UNKNOWN_IDS, Batch, Row
from microturn.model.runner import positions_of, wanted_of

ROWS = [
    Row(UNKNOWN_IDS, 7, [0]),
    Row([1, 2, 3], 0, [1], wants_logits=False),
    Row([4, 5, 6, 7], 30, [2], num_drafts=2),
    Row([8], 12, [3]),
]


def test_each_new_token_has_its_position() -> None:
    assert positions_of(Batch(ROWS)).tolist() == [7, 0, 1, 2, 30, 31, 32, 33, 12]


def test_logits_are_wanted_behind_a_row_and_the_tokens_of_its_draft() -> None:
    assert wanted_of(Batch(ROWS)).tolist() == [0, 5, 6, 7, 8]
    assert wanted_of(Batch(ROWS[1:2])).tolist() == []


def test_a_batch_counts_its_new_tokens() -> None:
    batch = Batch(ROWS)
    assert (batch.lengths.tolist(), batch.num_tokens) == ([1, 3, 4, 1], 9)
