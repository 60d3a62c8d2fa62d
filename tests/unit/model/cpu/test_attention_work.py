"""Tests of attention_work: whoever takes the units, all keys of all heads are attended once."""

from __future__ import annotations

from collections import Counter

import pytest

from microturn.model.batch import Batch, Row
from microturn.model.cpu.attention_work import SPLIT_LEN, TILE_ROWS, Shape, Work, plan
from microturn.model.paged_step import PagedStep

PAGE_SIZE = 16


def plan_of(rows: list[tuple[int, int]], shape: Shape, num_threads: int = 8) -> Work:
    """The work of rows, each of so many tokens behind so many."""
    batch = [Row([0] * new, known, list(range(-(-(known + new) // PAGE_SIZE)))) for known, new in rows]
    (step,) = PagedStep.plan(Batch(batch), PAGE_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba.get_num_threads", lambda: num_threads)
        return plan(step, shape)


@pytest.mark.parametrize("num_threads", [1, 2, 32])
@pytest.mark.parametrize("rows", [[(0, 1)], [(3000, 1)], [(3000, 1), (10, 1), (700, 40)], [(0, 500)], [(900, 5)] * 9])
@pytest.mark.parametrize(
    "shape",
    [Shape(3, 3, 64, 2**30), Shape(8, 4, 128, 2**30), Shape(1, 70, 64, 2**30), Shape(32, 1, 64, 100)],
    ids=["3 heads of 64", "8 heads of 128", "a group larger than a tile", "32 heads and a window"],
)
def test_units_take_each_task_of_each_head_once(rows: list[tuple[int, int]], shape: Shape, num_threads: int) -> None:
    work = plan_of(rows, shape, num_threads)
    taken = Counter(
        (task, head)
        for first, end, first_head, num_heads, *_ in work.units.tolist()
        for task in range(first, end)
        for head in range(first_head, first_head + num_heads)
    )
    assert taken == Counter((task, head) for task in range(len(work.tasks)) for head in range(shape.num_kv_heads))
    for first, _, _, num_heads, *_ in work.units.tolist():
        assert num_heads * work.tasks[first, 3] <= work.most_rows <= TILE_ROWS


@pytest.mark.parametrize("rows", [[(3000, 1)], [(3000, 1), (10, 1), (700, 40)], [(2000, 70)]])
def test_the_results_of_a_divided_tile_are_merged_in_the_order_of_its_keys(rows: list[tuple[int, int]]) -> None:
    work = plan_of(rows, Shape(3, 3, 64, 2**30))
    parts = [unit for unit in work.units.tolist() if unit[4] >= 0]
    tiles = {unit[7]: (*unit[2:4], *unit[5:9]) for unit in parts}
    assert sorted(tiles) == list(range(len(work.counters) - 1)) != []
    assert all(tiles[unit[7]] == (*unit[2:4], *unit[5:9]) for unit in parts)
    assert Counter(unit[7] for unit in parts) == {number: num_units for number, (*_, num_units) in tiles.items()}
    places = {}
    for first, end, _, _, result, tile_first, tile_end, number, _ in parts:
        first_result = result - (first - tile_first)
        places |= {first_result + task - tile_first: (number, task) for task in range(first, end)}
        assert first_result + tile_end - tile_first <= len(work.sums)
    assert [places[place] for place in range(len(work.sums))] == [
        (number, task) for number in range(len(work.counters) - 1) for task in range(*tiles[number][2:4])
    ]


def test_few_queries_of_all_heads_are_attended_together_and_many_head_by_head() -> None:
    shape = Shape(3, 3, 64, 2**30)
    assert {unit[3] for unit in plan_of([(3000, 1)] * 8, shape).units.tolist()} == {3}
    assert {unit[3] for unit in plan_of([(0, 512)], shape).units.tolist()} == {1}


def test_one_short_row_is_divided_by_heads() -> None:
    """Otherwise one thread would have all of it."""
    work = plan_of([(SPLIT_LEN // 2, 1)], Shape(3, 3, 64, 2**30))
    assert sorted(work.units[:, 2:4].tolist()) == [[0, 1], [1, 1], [2, 1]]


def test_heads_together_have_no_more_elements_than_a_cache_holds() -> None:
    """Two blocks of 32 heads of 128 would be more than L2: what is prefetched would be gone before it is read."""
    work = plan_of([(3000, 1)] * 8, Shape(32, 1, 128, 2**30))
    assert {unit[3] for unit in work.units.tolist()} == {4}
