"""Tests of snapshots.s3_storage, s3_index and s3_bucket: what a bucket has that a directory has not."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from microturn.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from microturn.settings import Settings
from microturn.snapshots import s3_bucket, s3_storage
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.opening import open_snapshots
from microturn.snapshots.s3_bucket import Bucket
from microturn.snapshots.s3_storage import S3Storage
from microturn.snapshots.storage import Content
from support.fake_runner import FakeDriver
from support.s3_server import BUCKET, S3Server
from support.snapshot_places import Place, make_place
from support.snapshots import RESUME, Restart, copied_kv, live, saved
from support.threads import starting_engines


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    request.getfixturevalue("s3")
    return make_place("s3", Path())


@pytest.fixture
def directory(place: Place) -> SnapshotDirectory:
    return SnapshotDirectory(place.storage, ttl_s=60)


def content(text: bytes) -> Content:
    return Content(text, [], len(text))


def keys_of(place: Place) -> list[str]:
    prefix = place.raw.place_of("").removeprefix(f"s3://{BUCKET}/")
    found = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [one["Key"].removeprefix(prefix) for one in found.get("Contents", ())]


def at(s3: S3Server, method: str, part: str, what: str, times: int = 100) -> list[str]:
    """A trouble with requests for some keys, so many times; returns those that had it."""
    had: list[str] = []

    def trouble(found: str, path: str) -> str | None:
        if (found, part in path) != (method, True) or len(had) >= times:
            return None
        had.append(path)
        return what

    s3.trouble = trouble
    return had


def hang_until(go_on: threading.Event) -> Callable[[str, str], str | None]:
    """A trouble: nothing is answered until the event."""
    return lambda *_: None if go_on.wait(30) else "refuse"


# ---- opening -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://no-such-bucket/a", "NoSuchBucket"), ("s3:///a", "is s3://bucket/prefix"), ("s3://", "is s3://bucket")],
)
@pytest.mark.usefixtures("s3")
def test_what_is_no_bucket_is_refused_at_the_start(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        open_snapshots(Settings(snapshot_dir=url))


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:9", "Could not connect"),
        ("storage.example:9000", "Invalid endpoint: storage.example"),
        ("http://[::1", "Invalid IPv6 URL"),
    ],
)
def test_a_bucket_that_does_not_answer_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, message: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(InvalidArgument, match=f"cannot be used: {message}"):
        open_snapshots(Settings(snapshot_dir=f"s3://{BUCKET}/a"))


def test_without_the_extra_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "microturn.snapshots.s3_bucket", "microturn.snapshots.s3_storage"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidArgument, match=r"needs the extra 'microturn\[s3\]'"):
        open_snapshots(Settings(snapshot_dir="s3://bucket/a"))


@pytest.mark.usefixtures("s3")
def test_a_storage_without_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "put_if", lambda self, key, content, _: self.put(key, content))
    with pytest.raises(InvalidArgument, match="without looking at If-Match"):
        S3Storage.at(f"s3://{BUCKET}/a")


def test_opening_leaves_nothing(place: Place) -> None:
    assert keys_of(place) == []


# ---- answers that are lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_a_move_whose_answer_is_lost_has_been_made(place: Place, s3: S3Server, times: int) -> None:
    """The repetition finds that somebody has written meanwhile: itself."""
    place.storage.write("a.snapshot", content(b"text"))
    had = at(s3, "PUT", ".index", "lose", times)
    assert place.storage.move("a.snapshot", "a.claimed")
    assert len(had) == times
    s3.trouble = None
    assert not place.storage.move("a.snapshot", "a.claimed")
    assert place.get("a.claimed") == b"text"


def test_a_claim_of_which_nothing_is_known_is_not_made_good(
    before: FakeDriver, directory: SnapshotDirectory, s3: S3Server
) -> None:
    """No answer to the claim, and none to the question whether it was written: then no server has the session."""
    live(before)
    directory.save(saved(before))
    snapshot = directory.find(1)
    assert snapshot is not None
    put: list[str] = []

    def trouble(method: str, path: str) -> str | None:
        if method == "PUT":
            put.append(path)
        return "lose" if put else None

    s3.trouble = trouble
    with pytest.raises(Unavailable, match="cannot be claimed now: try again"):
        directory.claim(snapshot)
    s3.trouble = None
    assert directory.find(1) is None


def test_a_snapshot_that_may_have_been_written_is_told_apart(
    before: FakeDriver, directory: SnapshotDirectory, s3: S3Server
) -> None:
    """Who hands a session over and goes on with it must know that there may be a copy."""
    live(before)
    put: list[str] = []

    def trouble(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith(".index"):
            put.append(path)
        return "lose" if put else None

    s3.trouble = trouble
    with pytest.raises(Unavailable, match="may have been written or not"):
        directory.save(saved(before))
    put.clear()
    with pytest.raises(FailedPrecondition, match="may have been written or not"):
        directory.save_next(saved(before, epoch=2), None, None, is_wanted=lambda: True)


def test_a_storage_that_refuses_keeps_what_it_had(
    before: FakeDriver, directory: SnapshotDirectory, place: Place, s3: S3Server
) -> None:
    live(before)
    directory.save(saved(before))
    kept = place.get(place.names[0])
    s3.trouble = lambda method, _: "refuse" if method == "PUT" else None
    with pytest.raises(FailedPrecondition, match="cannot write s3://"):
        directory.save(saved(before, epoch=2))
    s3.trouble = lambda *_: "refuse"
    with pytest.raises(Unavailable, match="cannot be read now: try again"):
        directory.find(1)
    with pytest.raises(FailedPrecondition, match="cannot look for"):
        directory.add_kv(saved(before), None)  # type: ignore[arg-type]
    directory.put_back(1)
    s3.trouble = None
    assert place.get(place.names[0]) == kept


def test_a_session_whose_storage_hangs_is_unavailable(
    before: FakeDriver, directory: SnapshotDirectory, s3: S3Server, restart: Restart
) -> None:
    live(before)
    directory.save(saved(before))
    go_on = threading.Event()
    s3.trouble = hang_until(go_on)
    after = restart()
    waiting, _ = after.post(1, max_tokens=0, **RESUME)
    after.engine.step()
    after.clock.now_s += 10.1
    after.engine.step()
    assert waiting.code == "UNAVAILABLE"
    s3.trouble = None
    go_on.set()
    until_s = time.monotonic() + 20
    while (answer := after.turn(1, max_tokens=0, **RESUME)).code and time.monotonic() < until_s:
        time.sleep(0.05)
    assert answer.status.context_len == 14


def test_a_storage_that_hangs_gives_the_thread_back(
    place: Place, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_bucket._ATTEMPTS * s3_bucket._READ_S <= 10
    monkeypatch.setattr(s3_bucket, "_READ_S", 0.3)
    storage = S3Storage.at(place.raw.place_of(""))
    go_on = threading.Event()
    s3.trouble = hang_until(go_on)
    begun_s = time.monotonic()
    with pytest.raises(OSError, match="Read timeout"):
        storage.id_of("a.snapshot")
    go_on.set()
    assert time.monotonic() - begun_s < 5


def test_kv_that_hangs_in_a_bucket_holds_up_no_other_session_and_not_the_stop(
    directory: SnapshotDirectory, s3: S3Server
) -> None:
    before = FakeDriver(max_context=256)
    for session_id in (1, 2):
        live(before, session_id)
        snapshot = saved(before, session_id)
        directory.save(snapshot)
        assert directory.add_kv(snapshot, copied_kv(before, session_id))
    go_on = threading.Event()
    hanging: list[str] = []

    def hang_first(method: str, path: str) -> None:
        if method == "GET" and ".snapshot." in path:
            hanging.append(path)
            if path == hanging[0]:
                go_on.wait(30)

    with starting_engines() as start:
        after = start(snapshots=directory, max_context=256)
        for session_id in (1, 2):
            after.ask(session_id, [], **RESUME).wait()
        s3.trouble = hang_first
        one = after.ask(1, [9], max_tokens=1)
        while not hanging:
            time.sleep(0.001)
        begun_s = time.monotonic()
        two = after.ask(2, [9], max_tokens=1).wait()
        assert two.status.usage["computed_tokens"] == 2
        assert not one.is_done
        after.engine.call(lambda maintenance: maintenance.stop())
        assert time.monotonic() - begun_s < 5
        assert one.code == "UNAVAILABLE"
        go_on.set()


# ---- contents ------------------------------------------------------------------------------------------------------


def test_a_large_file_goes_in_parts_and_is_read_from_anywhere(place: Place, s3: S3Server) -> None:
    text = random.Random(1).randbytes(40 << 20)
    pieces = [text[start : start + 7_000_000] for start in range(100, len(text), 7_000_000)]
    place.storage.write("a.snapshot", Content(text[:100], pieces, len(text)))
    assert len([path for method, path in s3.requests if method == "PUT" and ".a.snapshot" in path]) == 3
    with place.storage.open("a.snapshot") as file:
        assert file.num_bytes == len(text)
        for start in (0, 30 << 20, 5, len(text) - 3, len(text)):
            file.seek(start)
            assert file.read(1000) == text[start : start + 1000]


def test_a_large_file_whose_time_is_over_is_given_up(place: Place) -> None:
    place.storage.write("a.snapshot", content(b"before"))

    def pieces() -> Any:
        yield bytes(33 << 20)
        raise DeadlineExceeded("it took too long")

    with pytest.raises(DeadlineExceeded):
        place.storage.write("a.snapshot", Content(b"", pieces(), 50 << 20))
    assert place.get("a.snapshot") == b"before"
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)
    assert len(keys_of(place)) == 2


def test_old_contents_and_empty_indexes_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (b"one", b"two"):
        place.storage.write("a.snapshot", content(text))
    assert len(keys_of(place)) == 2
    place.storage.remove("a.snapshot")
    assert keys_of(place) == ["a.index"]
    assert place.names == []
    assert keys_of(place) == ["a.index"]
    monkeypatch.setattr(s3_storage, "_EMPTY_S", -10)
    assert place.names == []
    assert keys_of(place) == []


def test_a_file_that_is_replaced_while_it_is_opened_is_the_new_one(place: Place, s3: S3Server) -> None:
    place.storage.write("a.snapshot", content(b"one"))
    other = S3Storage.at(place.raw.place_of(""))

    def replace_once(method: str, path: str) -> None:
        if method == "GET" and "/.a.snapshot" in path:
            s3.trouble = None
            other.write("a.snapshot", content(b"two"))

    s3.trouble = replace_once
    assert place.get("a.snapshot") == b"two"


def test_many_servers_at_once_lose_nothing_and_have_nothing_twice(place: Place) -> None:
    """Each writes copies, and takes up what it finds: every copy is taken up, replaced, or still there."""
    storages = [place.storage, *(S3Storage.at(place.raw.place_of("")) for _ in range(3))]
    together = threading.Barrier(len(storages))

    def live_on(number: int) -> list[bytes]:
        taken, chance = [], random.Random(number)
        together.wait()
        for turn in range(12):
            if chance.random() < 0.5:
                storages[number].write("a.snapshot", content(b"%d of %d" % (turn, number)))
            elif storages[number].move("a.snapshot", f"a.claimed{number}"):
                taken.append(place.get(f"a.claimed{number}"))
        return taken

    with ThreadPoolExecutor(len(storages)) as threads:
        taken = [one for taken in threads.map(live_on, range(len(storages))) for one in taken]
    assert taken
    assert len(taken) == len(set(taken))
    assert len([key for key in keys_of(place) if key.startswith(".")]) == len(place.names)
