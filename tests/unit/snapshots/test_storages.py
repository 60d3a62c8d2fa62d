"""Sessions that outlive their server, in each kind of storage, through whole engines: saved, claimed, with their KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from microturn.admin.drain import drain
from microturn.admin.saver import Saver
from microturn.errors import InvalidArgument
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.encrypted_file import PREFIX_BYTES, TAG_BYTES
from microturn.snapshots.opening import open_snapshots
from support.fake_runner import expected_tokens
from support.snapshot_places import KINDS, SECRET, Place
from support.snapshots import RESUME
from support.threads import ThreadedDriver, starting_engines

FAR_S = 1e6  # no round comes by itself
ENCRYPTED = [kind for kind in KINDS if kind.startswith("encrypted")]
# Of the tests with KV of several chunks.
CHUNK_BYTES = 4096
SEALED_BYTES = CHUNK_BYTES + TAG_BYTES

Start = Callable[[], ThreadedDriver]


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    with starting_engines() as start_engine:
        yield lambda: start_engine(
            snapshots=SnapshotDirectory(place.storage, ttl_s=60), max_context=20_000, num_pages=8192
        )


class Talk:
    """Session 1, wherever it is; what it says must be right."""

    def __init__(self) -> None:
        self._history: list[int] = []

    def ask(self, driver: ThreadedDriver, given: list[int], **values: Any) -> int:
        """A turn; says how many tokens were computed."""
        answer = driver.ask(1, given, max_tokens=3, **values).wait()
        assert answer.error is None
        self._history += given
        assert answer.token_ids == expected_tokens(self._history, 3)
        self._history += answer.token_ids
        computed: int = answer.status.usage["computed_tokens"]
        return computed


def save_twice(driver: ThreadedDriver, talk: Talk, length: int = 40) -> None:
    """Saves a session in two rounds, as a server that dies then."""
    snapshots = driver.engine.snapshots
    assert snapshots is not None
    with closing(Saver(driver.engine, snapshots, FAR_S)) as saver:
        talk.ask(driver, [5] * length, start=True)
        saver._save_all()
        talk.ask(driver, [6] * 7)
        saver._save_all()


def test_a_session_whose_server_has_died_goes_on_with_its_kv(start: Start, place: Place) -> None:
    talk = Talk()
    save_twice(start(), talk)
    after = start()
    assert talk.ask(after, [9, 9], **RESUME) == 5  # the last token of the context, two of input, two of three
    assert start().ask(1, [9], **RESUME).wait().code == "NOT_FOUND"
    assert talk.ask(after, [4]) == 4
    save_twice(start(), Talk())  # one of the same id, later
    assert set(place.suffixes) == {".snapshot", ".claimed", ".kv"}


def test_a_session_of_a_drain_goes_on_with_its_kv(start: Start, place: Place) -> None:
    before, talk = start(), Talk()
    talk.ask(before, [5] * 40, start=True)
    assert drain(before.engine, 10).with_kv == 1
    assert place.suffixes == [".snapshot"]
    assert talk.ask(start(), [9, 9], **RESUME) == 5


def test_a_session_that_ends_leaves_nothing(start: Start, place: Place) -> None:
    server, talk = start(), Talk()
    assert server.engine.snapshots is not None
    with closing(Saver(server.engine, server.engine.snapshots, FAR_S)) as saver:
        talk.ask(server, [5] * 40, start=True)
        saver._save_all()
        assert len(place.names) == 2
        server.ask(1, [], end=True).wait()
        saver._forget_ended()
    assert place.names == []


def flipped(raw: bytearray) -> None:
    raw[-1] ^= 1


def cut_off(raw: bytearray) -> None:
    del raw[-1]


def without_a_chunk(raw: bytearray) -> None:
    assert len(raw) > 4 * SEALED_BYTES
    del raw[-2 * SEALED_BYTES : -SEALED_BYTES]


def without_the_last_chunk(raw: bytearray) -> None:
    head_len = int.from_bytes(raw[PREFIX_BYTES - 8 : PREFIX_BYTES], "little")
    body_start = PREFIX_BYTES + head_len + TAG_BYTES
    del raw[body_start + (len(raw) - body_start - 1) // SEALED_BYTES * SEALED_BYTES :]


def with_chunks_swapped(raw: bytearray) -> None:
    head_len = int.from_bytes(raw[PREFIX_BYTES - 8 : PREFIX_BYTES], "little")
    first = PREFIX_BYTES + head_len + TAG_BYTES
    second, end = first + SEALED_BYTES, first + 2 * SEALED_BYTES
    assert len(raw) > end
    raw[first:second], raw[second:end] = raw[second:end], raw[first:second]


def damage_kv(place: Place, damage: Callable[[bytearray], None]) -> None:
    name = place.kv_names[0]
    raw = bytearray(place.get(name))
    damage(raw)
    place.put(name, bytes(raw))


@pytest.mark.parametrize("damage", [flipped, cut_off])
def test_damaged_kv_is_computed_again(
    start: Start, place: Place, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk()
    save_twice(start(), talk)
    damage_kv(place, damage)
    assert talk.ask(start(), [9, 9], **RESUME) > 50
    assert "recomputed" in caplog.text


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
@pytest.mark.parametrize("damage", [without_a_chunk, without_the_last_chunk, with_chunks_swapped])
def test_kv_whose_chunks_are_not_in_order_is_computed_again(
    start: Start,
    place: Place,
    damage: Callable[[bytearray], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("microturn.snapshots.encrypted_file.CHUNK_BYTES", CHUNK_BYTES)
    talk = Talk()
    save_twice(start(), talk, length=3000)
    damage_kv(place, damage)
    assert talk.ask(start(), [9, 9], **RESUME) > 3000
    assert "recomputed" in caplog.text
    assert "is not what was written here" in caplog.text


@pytest.mark.parametrize("damage", [flipped, cut_off])
def test_a_damaged_snapshot_is_an_error_once(
    start: Start, place: Place, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_twice(start(), Talk())
    (name,) = [name for name in place.names if name.endswith(".snapshot")]
    raw = bytearray(place.get(name))
    damage(raw)
    place.put(name, bytes(raw))
    after = start()
    assert after.ask(1, [9], **RESUME).wait().code == "INTERNAL"
    assert after.ask(1, [9], **RESUME).wait().code == "NOT_FOUND"
    assert "cannot be restored" in caplog.text


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("kind", ["files", "s3"])
def test_settings_say_where_and_how(
    request: pytest.FixtureRequest, kind: str, secret: str | None, tmp_path: Any
) -> None:
    request.getfixturevalue("s3")
    where = "s3://snapshots/by-settings" if kind == "s3" else str(tmp_path / "sessions")
    (tmp_path / "key").write_text(f"{secret}\n")
    found = open_snapshots(Settings(snapshot_dir=where, snapshot_key_file=str(tmp_path / "key") if secret else ""))
    assert found is not None
    assert found.find(5) is None


def test_a_secret_that_cannot_be_used_is_said(tmp_path: Any) -> None:
    (tmp_path / "key").write_text("short")
    values = {"snapshot_dir": str(tmp_path / "sessions")}
    with pytest.raises(InvalidArgument, match=r"snapshot_key_file .* has a secret of 5 characters: 16 are the least"):
        open_snapshots(Settings(snapshot_key_file=str(tmp_path / "key"), **values))
    with pytest.raises(InvalidArgument, match=r"snapshot_key_file .* cannot be read"):
        open_snapshots(Settings(snapshot_key_file=str(tmp_path / "none"), **values))
    (tmp_path / "key").write_text(SECRET)
    with pytest.raises(InvalidArgument, match="needs a snapshot_dir"):
        open_snapshots(Settings(snapshot_key_file=str(tmp_path / "key")))
    assert open_snapshots(Settings()) is None
