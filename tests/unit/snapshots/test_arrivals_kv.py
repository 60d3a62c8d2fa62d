"""Tests of snapshots.arrivals: sessions that bring their KV along, through a whole engine."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from microturn.kv.image import KVImage
from microturn.snapshots.claimed_kv import ClaimedKV
from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver
from support.snapshots import RESUME, Restart, copied_kv, files, find, live, saved
from support.threads import starting_engines
from support.tiers import settle


def save_with_kv(before: FakeDriver, directory: SnapshotDirectory) -> None:
    snapshot = saved(before)
    directory.save(snapshot)
    assert directory.add_kv(snapshot, copied_kv(before))


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def go_on(driver: FakeDriver, **values: Any) -> tuple[list[int], int]:
    """What a turn says, and how many tokens were computed for it."""
    answer = driver.turn(1, [9], max_tokens=3, temperature=0, **values)
    return answer.token_ids, answer.status.usage["computed_tokens"]


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_with_its_kv_nothing_is_computed_again(
    before: FakeDriver, directory: SnapshotDirectory, restart: Restart, tmp_path: Path, tier: str
) -> None:
    live(before)
    save_with_kv(before, directory)
    tiers: dict[str, Any] = {"host": {"host_tier_bytes": 1 << 20}, "disk": {"disk_tier_dir": str(tmp_path / "tier")}}
    (tmp_path / "tier").mkdir()
    after = restart(**tiers.get(tier, {}))
    assert after.turn(1, **RESUME).status.context_len == 14
    assert find(after).kv_len == find(before).kv_len == 13
    assert after.runner.batches == []
    assert go_on(after) == go_on(before)
    assert find(after).stored is None
    assert go_on(after) == go_on(before)
    after.engine.stop()
    (claimed,) = files(tmp_path, ".claimed")
    assert claimed.stat().st_size == 8 + int.from_bytes(claimed.read_bytes()[:8], "little")


def test_kv_waits_in_its_file_until_a_turn_wants_it(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, tmp_path: Path
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    assert after.pool.num_free == after.pool.num_pages
    size = files(tmp_path, ".claimed")[0].stat().st_size
    assert size > find(after).stored.image.num_bytes  # type: ignore[union-attr]
    after.turn(1, end=True)
    after.engine.stop()
    assert files(tmp_path, ".claimed")[0].stat().st_size < size


@pytest.mark.parametrize("trouble", ["flipped bit", "truncated", "another page_size", "no tokens of it", "gone"])
def test_kv_that_cannot_be_used_is_computed_again(
    before: FakeDriver,
    directory: SnapshotDirectory,
    restart: Restart,
    tmp_path: Path,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live(before)
    save_with_kv(before, directory)
    if trouble == "no tokens of it":
        snapshot = saved(before)
        kv = copied_kv(before)
        directory.add_kv(snapshot, replace(kv, state=replace(kv.state, kv_len=14)))
    (file,) = files(tmp_path, ".snapshot")
    after = restart(page_size=8 if trouble == "another page_size" else 4)
    if trouble == "flipped bit":
        flip_last_bit(file)
    if trouble == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    after.turn(1, **RESUME)
    if trouble == "gone":
        files(tmp_path, ".claimed")[0].unlink()
    tokens, _ = go_on(before)
    assert go_on(after) == (tokens, 17)
    assert "KV of session 1 is recomputed" in caplog.text or "KV is recomputed" in caplog.text
    assert go_on(after) == go_on(before)


def test_a_windows_kv_goes_on_where_it_had_slid_to(directory: SnapshotDirectory, restart: Restart) -> None:
    window = {"overflow": "window", "window_tokens": 16, "sink_tokens": 4}
    before = FakeDriver(max_context=128, window_slack=4)
    before.turn(1, [*range(1, 60)], start=True, max_tokens=30, temperature=0, **window)
    assert find(before).num_dropped > 40
    save_with_kv(before, directory)
    after = restart(max_context=128, window_slack=4)
    after.turn(1, **RESUME)
    for _ in range(8):
        assert go_on(after) == go_on(before)
    assert after.turn(1, rewind_to=len(find(after).context) - 3, max_tokens=0).error is None


def test_a_window_keeps_its_memory_though_its_kv_cannot_be_read_at_once(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told before the window is nowhere but in its KV, and one request that failed threw that away."""
    values: dict[str, Any] = {"max_context": 128, "window_slack": 4, "history_bytes": 0}
    before = FakeDriver(**values)
    window = {"overflow": "window", "window_tokens": 16, "sink_tokens": 4}
    before.turn(1, [*range(1, 60)], start=True, max_tokens=30, temperature=0, **window)
    assert find(before).context.num_forgotten
    save_with_kv(before, directory)
    is_back = threading.Event()
    read = ClaimedKV.read

    def read_or_refuse(source: ClaimedKV, pages: KVImage) -> None:
        if not is_back.is_set():
            raise OSError(errno.EIO, "503 Slow Down")
        read(source, pages)

    monkeypatch.setattr(ClaimedKV, "read", read_or_refuse)
    with starting_engines() as start:
        after = start(snapshots=directory, **values)
        after.ask(1, [], **RESUME).wait()
        waiting = after.ask(1, [9], max_tokens=3, temperature=0)
        other = after.ask(2, [5], start=True, max_tokens=1).wait()
        assert not waiting.is_done, "nobody else waits for it"
        assert other.status.finish_reason == "length"
        is_back.set()
        answer = waiting.wait()
    assert (answer.token_ids, answer.status.usage["computed_tokens"]) == go_on(before)
    assert not answer.status.rebuilt


def test_layers_with_a_window_of_their_own_go_on_with_what_they_keep(
    directory: SnapshotDirectory, restart: Restart
) -> None:
    before = FakeDriver(max_context=128, window_slack=4, window=9)
    before.turn(1, [*range(1, 90)], start=True, max_tokens=5, temperature=0)
    assert len(find(before).table.used_pages) < 60
    save_with_kv(before, directory)
    after = restart(max_context=128, window_slack=4, window=9)
    after.turn(1, **RESUME)
    for _ in range(4):
        assert go_on(after) == go_on(before)
    length = len(find(before).context)
    assert go_on(after, rewind_to=length - 4) == go_on(before, rewind_to=length - 4)


def test_a_branch_of_what_was_just_taken_up_shares_its_kv(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    branch = after.turn(2, [9], start=True, fork_of="1", max_tokens=3, temperature=0)
    tokens, num_computed = go_on(before)
    assert (branch.token_ids, branch.status.usage["computed_tokens"]) == (tokens, num_computed)
    assert go_on(after) == (tokens, num_computed)


def test_a_turn_that_is_cancelled_while_kv_comes_leaves_no_memory_taken(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    _, turn = after.post(1, [9], max_tokens=3)
    after.engine.step()
    after.engine.cancel(turn)
    storage = after.engine._tiers.storage
    settle(after)
    after.steps(3)
    assert storage.host.used_bytes == 0
    assert go_on(after) == go_on(before)


def test_an_engine_stops_while_kv_is_read(
    before: FakeDriver, after: FakeDriver, directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been read came to a storage that knew the copy no more, and who stopped the engine got the exception."""
    live(before)
    save_with_kv(before, directory)
    after.turn(1, **RESUME)
    has_begun = threading.Event()
    read = ClaimedKV.read

    def read_slowly(source: ClaimedKV, pages: KVImage) -> None:
        has_begun.set()
        while not after.engine._is_stopping:
            time.sleep(0.001)
        read(source, pages)

    monkeypatch.setattr(ClaimedKV, "read", read_slowly)
    waiting, _ = after.post(1, [9], max_tokens=3)
    after.engine.step()
    assert has_begun.wait(30)
    late, _ = after.post(2, [9], start=True)
    after.engine.stop()
    assert waiting.code == late.code == "UNAVAILABLE"
