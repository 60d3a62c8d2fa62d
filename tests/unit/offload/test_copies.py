"""Tests of tiers.copies, through a whole engine: a copy is of one moment, whatever its session does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from microturn.kv import copier as kv_copier
from microturn.offload.image_file import DamagedFile
from support.fake_runner import FakeDriver, expected_tokens
from support.snapshots import copied_kv, find
from support.tiers import settle, tensors_of


@pytest.fixture(autouse=True)
def one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copier, "_BYTES_FOR_LATER", 1)


def parked(**settings: Any) -> FakeDriver:
    """With a session of 30 tokens, of which 29 are in the cache."""
    driver = FakeDriver(num_pages=64, max_context=64, **settings)
    driver.turn(1, [*range(1, 29)], start=True, max_tokens=2)
    return driver


def cells(driver: FakeDriver, kv_len: int) -> torch.Tensor:
    """What stands in the session's pages, up to a length."""
    pages = driver.runner.kv.layers[0].elements[find(driver).table.pages]
    return pages.transpose(0, 1).reshape(2, -1)[:, :kv_len].clone()


def copied_cells(driver: FakeDriver) -> torch.Tensor:
    copy = copied_kv(driver)
    return tensors_of(copy.pages)[0].transpose(0, 1).reshape(2, -1)[:, : copy.state.kv_len]


def test_a_parked_sessions_kv_is_copied_whole() -> None:
    driver = parked()
    copy = copied_kv(driver)
    assert copy.state == find(driver).table.save()
    assert torch.equal(copied_cells(driver), cells(driver, 29))


def test_a_session_goes_on_while_it_is_copied() -> None:
    """It appends, cuts back into what is being copied, and others take the pages that it gives up."""
    driver = parked()
    before = cells(driver, 29)
    history = list(find(driver).context.token_ids)
    copies = driver.engine.copies
    copying = copies.begin(find(driver))
    assert copying is not None
    assert not copies.advance(copying)
    given = [[7, 8], [9], [10, 11, 12]]
    for number, rewind_to in enumerate((30, 18, 5)):
        del history[rewind_to:]
        answer = driver.turn(1, given[number], rewind_to=rewind_to, max_tokens=4)
        assert answer.token_ids == expected_tokens([*history, *given[number]], 4)
        history += [*given[number], *answer.token_ids]
        driver.turn(2 + number, [*range(20)], start=True, max_tokens=1)
    while not copies.advance(copying):
        copying.settle()
    copies.end(copying)
    driver.engine.check_integrity()
    pages = tensors_of(copies.finish(copying).pages)[0]
    assert torch.equal(pages.transpose(0, 1).reshape(2, -1)[:, :29], before)


def test_a_copy_that_is_given_up_shares_nothing() -> None:
    driver = parked()
    copies = driver.engine.copies
    copying = copies.begin(find(driver))
    assert copying is not None
    driver.turn(1, end=True)
    assert driver.pool.num_free == 64 - 8
    copies.end(copying)
    driver.engine.check_integrity()
    assert driver.pool.num_free == 64


def test_a_running_session_is_copied_as_of_its_last_committed_point() -> None:
    driver = parked()
    before = cells(driver, 29)
    driver.post(1, [5, 6], max_tokens=20)
    driver.steps(6)
    assert find(driver).table.kv_len > 31
    assert copied_kv(driver).state.kv_len == 29
    assert torch.equal(copied_cells(driver), before)


def test_what_has_no_kv_is_not_copied() -> None:
    driver = FakeDriver()
    driver.turn(1, [5], start=True, max_tokens=0)
    assert driver.engine.copies.begin(find(driver)) is None


def test_what_was_lost_behind_the_pool_is_not_copied() -> None:
    """A drain asks every session for its KV, also those whose copy has given way to others."""
    driver = parked(host_tier_bytes=1 << 20)
    assert driver.engine._tiers.reclaim()
    storage = driver.engine._tiers.storage
    driver.steps(3)
    storage.host.capacity_bytes = 0
    driver.steps(1)
    stored = find(driver).stored
    assert stored is not None
    assert stored.image.is_lost
    assert driver.engine.copies.begin(find(driver)) is None


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("rewind_to", [30, 14])
def test_kv_outside_the_pool_is_copied_where_it_is(tmp_path: Path, tier: str, rewind_to: int) -> None:
    driver = parked(**({"host_tier_bytes": 1 << 20} if tier == "host" else {"disk_tier_dir": str(tmp_path)}))
    before = cells(driver, 29)
    assert driver.engine._tiers.reclaim()
    settle(driver)
    driver.turn(1, rewind_to=rewind_to, max_tokens=0)
    stored = find(driver).stored
    assert stored is not None
    assert (stored.image.pages is None) == (tier == "disk")
    copy = copied_kv(driver)
    assert copy.pages.num_pages == copy.state.num_pages
    assert torch.equal(copied_cells(driver), before[:, : rewind_to - 1])
    assert find(driver).stored is stored
    driver.engine.stop()


def test_kv_whose_file_is_gone_cannot_be_copied(tmp_path: Path) -> None:
    driver = parked(disk_tier_dir=str(tmp_path))
    assert driver.engine._tiers.reclaim()
    settle(driver)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedFile):
        copied_kv(driver)
    driver.engine.stop()
