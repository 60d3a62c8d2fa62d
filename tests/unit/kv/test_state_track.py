"""Which recurrent states are kept, how many at most, and what is left after a cut."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest
import torch

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_table import PageTable
from microturn.kv.page_track import Track
from microturn.kv.pool import PagePool
from microturn.kv.state_track import _CHOICES, StateTrack, block_of
from microturn.kv.tensors import KVTensors
from microturn.snapshots.kv_part import _track_of

PAGE_SIZE = 16
BLOCK = 64
PAGES_PER_STATE = 3

choices = pytest.mark.parametrize("choice", _CHOICES, ids=str)


def new_table(pool: PagePool, choice: tuple[int, int]) -> PageTable:
    return PageTable(pool, [Track(), StateTrack(PAGES_PER_STATE, BLOCK, *choice)])


def grow(table: PageTable, num_tokens: int) -> None:
    """As a step does it: what is kept no longer goes first."""
    if table.kv_len:
        table.slide(table.kv_len)
    assert table.reserve(table.kv_len + num_tokens)
    table.kv_len += num_tokens


def states_of(table: PageTable) -> StateTrack:
    track = table.tracks[-1]
    assert isinstance(track, StateTrack)
    return track


@pytest.mark.parametrize(("page_size", "expected"), [(16, 64), (64, 64), (48, 96), (128, 128)])
def test_a_block_is_whole_pages(page_size: int, expected: int) -> None:
    assert block_of(page_size) == expected


@choices
@pytest.mark.parametrize("max_new", [1, 30, 500])
def test_a_session_never_has_more_pages_than_is_said(choice: tuple[int, int], max_new: int) -> None:
    rng = random.Random(max_new)
    pool = PagePool(4000, PAGE_SIZE)
    table = new_table(pool, choice)
    most = 0
    while table.kv_len < 9000:
        grow(table, rng.randint(1, max_new))
        table.check_integrity()
        num_pages = len(table.page_ids[1])
        assert num_pages <= states_of(table).most_pages(table.kv_len, max_new)
        assert len(states_of(table).older) + states_of(table).num_dense <= states_of(table).num_kept(table.kv_len)
        most = max(most, num_pages)
    pool.check_integrity([table.pages])
    assert most > states_of(table).num_dense * PAGES_PER_STATE


@choices
def test_a_cut_computes_no_more_than_is_said_again(choice: tuple[int, int]) -> None:
    num_dense, growth = choice
    table = new_table(PagePool(4000, PAGE_SIZE), choice)
    for length in range(1, 8000, 37):
        grow(table, length - table.kv_len)
        for back in (1, 20, 63, 64, 65, 200, 1000, 5000):
            if back >= length:
                continue
            left = table.save().cut(length - back)
            assert left.kv_len % BLOCK == 0
            num_again = length - back - left.kv_len
            assert 0 <= num_again <= (back + BLOCK) * growth / (num_dense - 1) + BLOCK
            assert num_again < BLOCK or back > (num_dense - 1) * BLOCK


@choices
def test_a_cut_leaves_the_first_of_the_used_pages(choice: tuple[int, int]) -> None:
    """So that it may be made of a copy too, whose pages are in the order of the tokens."""
    rng = random.Random(1)
    table = new_table(PagePool(4000, PAGE_SIZE), choice)
    while table.kv_len < 3000:
        grow(table, rng.randint(1, 90))
    used, state = table.used_pages, table.save()
    assert len(used) == state.num_pages
    assert state.num_rewritten == (PAGES_PER_STATE if table.kv_len % BLOCK else 0)
    assert used[len(used) - state.num_rewritten :] == table.page_ids[1][-PAGES_PER_STATE:].tolist()
    for at in range(0, 3000, 100):
        branch = new_table(PagePool(4000, PAGE_SIZE), choice)
        assert branch.load(state.cut(at))
        assert branch.num_pages == state.cut(at).num_pages <= len(used)
        table.truncate(max(at, state.kv_len - at))
        assert table.used_pages == used[: len(table.used_pages)]


def test_a_branch_shares_whole_blocks_only() -> None:
    pool = PagePool(400, PAGE_SIZE)
    parent, child = new_table(pool, _CHOICES[0]), new_table(pool, _CHOICES[0])
    grow(parent, 150)
    grow(parent, 10)  # the pages of its keys are full, those of its newest state are not
    child.adopt_from(parent, 160)
    assert child.kv_len == 128
    assert not set(child.page_ids[1]) & set(parent.page_ids[1][-PAGES_PER_STATE:])
    for table in (parent, child):
        grow(table, 100)
        table.check_integrity()
    pool.check_integrity([parent.pages, child.pages])


def test_a_step_that_is_not_committed_loses_the_newest_state() -> None:
    table = new_table(PagePool(400, PAGE_SIZE), _CHOICES[0])
    grow(table, 128)
    table.drop_newest_state()
    assert table.kv_len == 128
    grow(table, 5)
    table.drop_newest_state()
    assert table.kv_len == 128
    table.check_integrity()


def test_the_states_that_a_row_reads_and_writes() -> None:
    table = new_table(PagePool(4000, PAGE_SIZE), _CHOICES[0])
    assert table.reserve(70)
    assert table.state_pages.tolist() == table.page_ids[1].reshape(-1, PAGES_PER_STATE).tolist()
    table.kv_len = 70
    while table.kv_len < 2000:
        grow(table, 29)
    newest = table.page_ids[1][-PAGES_PER_STATE:].tolist()
    assert table.state_pages.tolist() == [newest]
    table.truncate(700)
    assert table.kv_len == 512, "the only one of these older states"
    assert table.state_pages[0].tolist() == table.page_ids[1][-PAGES_PER_STATE:].tolist()


def test_a_track_comes_back_from_a_snapshot() -> None:
    track = StateTrack(3, 64, 2, 8, older=(0, 7), num_evicted=640)
    assert _track_of(json.loads(json.dumps(asdict(track)))) == track
    assert _track_of(json.loads(json.dumps(asdict(Track(num_evicted=32))))) == Track(num_evicted=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_states_in_pages_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    kv = KVTensors([LayerShape(2, 8), LayerShape(1, 4)], 20, PAGE_SIZE, dtype, state_bytes=5000)
    assert kv.states is not None
    assert kv.state_track is not None
    num_pages = kv.state_track.num_groups
    assert num_pages == -(-5000 // kv.bytes_per_page)
    states = torch.randint(0, 256, kv.states.new_states(2).shape, dtype=torch.uint8)
    pages = torch.randperm(20)[: 2 * num_pages].view(2, -1)
    others = [page for page in range(20) if page not in pages.flatten().tolist()]
    before = [tensor[others].clone() for tensor in kv.tensors]
    kv.states.write(pages, states)
    assert torch.equal(kv.states.read(pages), states)
    assert torch.equal(kv.states.read(pages[1:]), states[1:])
    for tensor, was in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor[others].view(torch.uint8), was.view(torch.uint8))


def test_the_older_states_of_a_cut_session_stay() -> None:
    track = replace(StateTrack(1, 64, 2, 2), older=(0, 3, 7), num_evicted=640)
    assert track.positions(800) == [768, 704, 512, 256, 64]
    cut = track.cut(256)
    assert (cut.older, cut.num_evicted) == ((0, 3), 256)
    assert cut.holds(256)
    assert not cut.reaches(192)
