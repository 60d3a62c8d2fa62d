"""Tests of admin.operations: an engine on its own thread, real files."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.admin.operations import Operations
from microturn.errors import FailedPrecondition, InvalidArgument, MicroturnError, NotFound, ResourceExhausted
from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import expected_tokens
from support.snapshots import RESUME
from support.threads import ThreadedDriver, starting_engines

Start = Callable[..., ThreadedDriver]


@pytest.fixture
def start() -> Iterator[Start]:
    with starting_engines() as start:
        yield start


@pytest.fixture
def driver(start: Start) -> ThreadedDriver:
    """With one session, of four tokens."""
    driver = start(max_context=4096, num_pages=4096)
    driver.ask(1, [5, 6], start=True, max_tokens=2, session_key="ours").wait()
    return driver


HISTORY = [5, 6, *expected_tokens([5, 6], 2)]


def do(driver: ThreadedDriver, op: str, **arguments: Any) -> Any:
    return Operations(driver.engine).answer({"op": op, **arguments})


def export(driver: ThreadedDriver, file: Path, **arguments: Any) -> Any:
    return do(driver, "export", **{"id": "1", "path": str(file), "ttl_s": 60, **arguments})


def go_on(driver: ThreadedDriver) -> list[int]:
    answer = driver.ask(1, [7], max_tokens=3, session_key="ours", **RESUME).wait()
    if answer.error is not None:
        raise answer.error
    return answer.token_ids


# ---- list ----------------------------------------------------------------------------------------------------------


def test_sessions_are_listed(driver: ThreadedDriver) -> None:
    (session,) = do(driver, "list")
    assert (session["id"], session["context_len"], session["state"]) == (1, 4, "parked")


def test_an_engine_is_busy_as_long_as_there_are_turns(driver: ThreadedDriver) -> None:
    assert do(driver, "is_busy") is False
    held = driver.engine.call(lambda sessions: sessions.hold(1))
    assert held is not None
    waiting = driver.ask(1, [7], max_tokens=2, session_key="ours")
    assert do(driver, "is_busy") is True
    driver.engine.call(lambda sessions: sessions.let_go(held.copy, has_copy=False))
    waiting.wait()
    assert do(driver, "is_busy") is False


@pytest.mark.parametrize(("op", "hint"), [("lst", "did you mean 'list'"), ("zz", "known are: drain"), (7, "known are")])
def test_what_cannot_be_asked_is_refused(driver: ThreadedDriver, op: Any, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        do(driver, op)


# ---- export and import ---------------------------------------------------------------------------------------------


def test_a_session_goes_on_elsewhere_from_a_file(driver: ThreadedDriver, start: Start, tmp_path: Path) -> None:
    told = export(driver, tmp_path / "one")
    assert (told["id"], told["context_len"]) == (1, 4)
    other = start()
    assert do(other, "import", path=str(tmp_path / "one")) == told
    assert go_on(other) == expected_tokens([*HISTORY, 7], 3)
    assert [file.name for file in tmp_path.iterdir()] == ["one.claimed"]


def test_the_imported_session_has_its_key(driver: ThreadedDriver, start: Start, tmp_path: Path) -> None:
    export(driver, tmp_path / "one")
    other = start()
    do(other, "import", path=str(tmp_path / "one"))
    assert other.ask(1, [7]).wait().code == "PERMISSION_DENIED"
    assert b"ours" not in (tmp_path / "one.claimed").read_bytes()


def test_a_copied_session_goes_on_here_too(driver: ThreadedDriver, tmp_path: Path) -> None:
    export(driver, tmp_path / "one")
    assert go_on(driver) == expected_tokens([*HISTORY, 7], 3)


def test_a_moved_session_is_gone_here_and_may_come_back(driver: ThreadedDriver, tmp_path: Path) -> None:
    """The client was told that the session was closed, as if it had been lost."""
    export(driver, tmp_path / "one", move=True)
    with pytest.raises(NotFound, match="was moved to another server: go on there"):
        go_on(driver)
    do(driver, "import", path=str(tmp_path / "one"))
    assert go_on(driver) == expected_tokens([*HISTORY, 7], 3)


def test_the_copy_of_a_session_that_went_on_is_refused_where_it_went_on(driver: ThreadedDriver, tmp_path: Path) -> None:
    export(driver, tmp_path / "one")
    with pytest.raises(FailedPrecondition, match="is live here"):
        do(driver, "import", path=str(tmp_path / "one"))
    driver.ask(1, [], end=True, session_key="ours").wait()
    with pytest.raises(FailedPrecondition, match="out of date"):
        do(driver, "import", path=str(tmp_path / "one"))
    assert (tmp_path / "one").exists()


def test_a_file_is_imported_once(driver: ThreadedDriver, start: Start, tmp_path: Path) -> None:
    export(driver, tmp_path / "one", move=True)
    shutil.copy(tmp_path / "one", tmp_path / "two")
    other = start()
    do(other, "import", path=str(tmp_path / "one"))
    with pytest.raises(NotFound, match="there is no file"):
        do(other, "import", path=str(tmp_path / "one"))
    with pytest.raises(FailedPrecondition, match="is live here"):
        do(other, "import", path=str(tmp_path / "two"))


def test_a_busy_session_is_copied_as_it_was_and_not_moved(driver: ThreadedDriver, start: Start, tmp_path: Path) -> None:
    running = driver.ask(1, [8], max_tokens=4000, session_key="ours")
    assert running.begun.wait(10)
    with pytest.raises(FailedPrecondition, match="try again"):
        export(driver, tmp_path / "one", move=True)
    assert list(tmp_path.iterdir()) == []
    export(driver, tmp_path / "two")
    other = start()
    do(other, "import", path=str(tmp_path / "two"))
    assert go_on(other) == expected_tokens([*HISTORY, 7], 3)


def test_a_session_whose_turn_nobody_hears_is_moved_and_the_turn_is_done_where_it_is_asked_for(
    driver: ThreadedDriver, start: Start, tmp_path: Path
) -> None:
    """Until its client came back or it expired, such a session could not be moved: `has a turn: try again`."""
    asked: dict[str, Any] = {"turn": 1, "max_tokens": 4000, "session_key": "ours"}
    recorder, turn = driver.post(1, [8], **asked)
    until_s = time.monotonic() + 10
    while not recorder.outputs and time.monotonic() < until_s:
        time.sleep(0.005)
    driver.engine.cancel(turn)
    assert do(driver, "list")[0]["state"] == "parked"
    export(driver, tmp_path / "one", move=True)
    with pytest.raises(NotFound, match="was moved to another server: go on there"):
        go_on(driver)
    other = start(max_context=4096, num_pages=4096)
    do(other, "import", path=str(tmp_path / "one"))
    again = other.ask(1, [8], **asked | {"max_tokens": 30}).wait()
    assert again.token_ids == expected_tokens([*HISTORY, 8], 30)
    assert not again.status.replayed


def test_with_its_kv_a_session_computes_nothing_again_elsewhere(
    driver: ThreadedDriver, start: Start, tmp_path: Path
) -> None:
    told = export(driver, tmp_path / "one", kv=True)
    assert told["kv_len"] == 3
    other = start()
    assert do(other, "import", path=str(tmp_path / "one")) == told
    assert [session["kv"] for session in do(other, "list")] == ["disk"]
    answer = other.ask(1, [7], max_tokens=3, session_key="ours", **RESUME).wait()
    assert answer.token_ids == expected_tokens([*HISTORY, 7], 3)
    assert answer.status.usage["computed_tokens"] == 4
    assert [session["kv"] for session in do(other, "list")] == ["device"]


def test_a_running_session_is_exported_with_the_kv_of_what_it_had(
    driver: ThreadedDriver, start: Start, tmp_path: Path
) -> None:
    running = driver.ask(1, [8], max_tokens=4000, session_key="ours")
    assert running.begun.wait(10)
    assert export(driver, tmp_path / "one", kv=True)["kv_len"] == 3
    other = start()
    do(other, "import", path=str(tmp_path / "one"))
    assert go_on(other) == expected_tokens([*HISTORY, 7], 3)


def test_a_session_without_kv_is_exported_all_the_same(start: Start, tmp_path: Path) -> None:
    driver = start()
    driver.ask(1, [5], start=True, max_tokens=0).wait()
    assert export(driver, tmp_path / "one", kv=True)["kv_len"] == 0


@pytest.mark.parametrize("damage", ["flipped bit", "truncated"])
def test_damaged_kv_is_computed_again_after_an_import(
    driver: ThreadedDriver, start: Start, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "one"
    export(driver, path, kv=True)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flipped bit" else content[:-1])
    other = start()
    do(other, "import", path=str(path))
    answer = other.ask(1, [7], max_tokens=3, session_key="ours", **RESUME).wait()
    assert answer.token_ids == expected_tokens([*HISTORY, 7], 3)
    assert answer.status.usage["computed_tokens"] == 7


def test_no_file_is_overwritten(driver: ThreadedDriver, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("precious")
    with pytest.raises(FailedPrecondition, match="is there already"):
        export(driver, tmp_path / "one")
    assert (tmp_path / "one").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"id": "2"}, "NOT_FOUND: no session '2' is here"),
        ({"id": 1}, "INVALID_ARGUMENT: 'id' is missing"),
        ({"path": "relative"}, "INVALID_ARGUMENT: 'path' is absolute"),
        ({"path": "/nowhere/at/all"}, "FAILED_PRECONDITION: cannot write /nowhere/at/all"),
        ({"ttl_s": 0}, "INVALID_ARGUMENT: 'ttl_s' is missing"),
        ({"ttl_s": float("nan")}, "INVALID_ARGUMENT: 'ttl_s' is missing"),
        ({"ttl_s": True}, "INVALID_ARGUMENT: 'ttl_s' is missing"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    driver: ThreadedDriver, tmp_path: Path, arguments: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(MicroturnError) as refused:
        export(driver, tmp_path / "one", **arguments)
    assert str(refused.value).startswith(refusal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", ["flipped bit", "truncated", "another model", "expired", "not there", "no room"])
def test_what_cannot_be_imported_is_refused_and_stays(
    driver: ThreadedDriver, start: Start, tmp_path: Path, trouble: str
) -> None:
    path = tmp_path / "one"
    export(driver, path, ttl_s=0.05 if trouble == "expired" else 60)
    other = start(model_fingerprint="another" if trouble == "another model" else "the test's", max_sessions=1)
    expected: tuple[type[MicroturnError], str]
    match trouble:
        case "flipped bit":
            content = bytearray(path.read_bytes())
            content[-20] ^= 1
            path.write_bytes(content)
            expected = InvalidArgument, "its checksum is wrong"
        case "truncated":
            path.write_bytes(path.read_bytes()[:-20])
            expected = InvalidArgument, "its checksum is wrong"
        case "another model":
            expected = FailedPrecondition, "was saved with another model"
        case "expired":
            time.sleep(0.06)
            expected = FailedPrecondition, "has expired"
        case "not there":
            path = tmp_path / "none"
            expected = NotFound, "there is no file"
        case _:
            other.ask(9, [1], start=True).wait()
            expected = ResourceExhausted, "1 sessions are open"
    with pytest.raises(expected[0], match=expected[1]):
        do(other, "import", path=str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    assert all(session["id"] == 9 for session in do(other, "list"))


# ---- drain ---------------------------------------------------------------------------------------------------------


def test_a_drain_saves_every_session_for_the_next_server(start: Start, tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    before = start(snapshots=directory)
    for session_id in range(1, 11):
        before.ask(session_id, [session_id], start=True, max_tokens=2).wait()
    assert do(before, "drain", timeout_s=5) == {"saved": 10, "failed": 0, "with_kv": 10, "moved": 0}
    after = start(snapshots=directory)
    for session_id in range(1, 11):
        history = [session_id, *expected_tokens([session_id], 2)]
        answer = after.ask(session_id, [50], max_tokens=3, **RESUME).wait()
        assert answer.token_ids == expected_tokens([*history, 50], 3)


def test_a_drain_waits_for_turns_that_end_in_time(start: Start, tmp_path: Path) -> None:
    driver = start(snapshots=SnapshotDirectory(tmp_path, ttl_s=60), max_context=4096, num_pages=4096)
    running = driver.ask(1, [8], start=True, turn=0, max_tokens=50)
    assert running.begun.wait(10)
    assert do(driver, "drain", timeout_s=20) == {"saved": 1, "failed": 0, "with_kv": 1, "moved": 0}
    assert len(running.wait().token_ids) == 50
    after = start(snapshots=SnapshotDirectory(tmp_path, ttl_s=60))
    again = after.ask(1, [8], start=True, turn=0, max_tokens=50).wait()
    assert again.status.replayed
    assert again.token_ids == running.token_ids


def test_a_drain_undoes_what_does_not_end_in_time(start: Start, tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    driver = start(snapshots=directory, max_context=100_000, num_pages=30_000)
    driver.ask(1, [5, 6], start=True, max_tokens=2).wait()
    running = driver.ask(1, [8], max_tokens=90_000)
    assert running.begun.wait(10)
    begun_s = time.monotonic()
    assert do(driver, "drain", timeout_s=0.5) == {"saved": 1, "failed": 0, "with_kv": 1, "moved": 0}
    assert time.monotonic() - begun_s < 5
    assert running.wait().code == "UNAVAILABLE"
    after = start(snapshots=directory)
    assert after.ask(1, [7], max_tokens=3, **RESUME).wait().token_ids == expected_tokens([*HISTORY, 7], 3)


def test_turns_that_come_while_a_drain_waits_are_told_to_come_back(start: Start, tmp_path: Path) -> None:
    driver = start(snapshots=SnapshotDirectory(tmp_path, ttl_s=60), max_context=100_000, num_pages=30_000)
    driver.ask(2, [5], start=True).wait()
    running = driver.ask(1, [8], start=True, max_tokens=90_000)
    assert running.begun.wait(10)
    draining = threading.Thread(target=lambda: do(driver, "drain", timeout_s=1))
    draining.start()
    codes = set()
    while draining.is_alive():
        codes.add(driver.ask(2, [6]).wait().code)
        time.sleep(0.05)
    draining.join()
    assert codes - {None} == {"UNAVAILABLE"}


def test_one_drain_at_a_time(start: Start, tmp_path: Path) -> None:
    """Two that saved the same session: what one had handed over the other removed."""
    driver = start(snapshots=SnapshotDirectory(tmp_path, ttl_s=60), max_context=100_000, num_pages=30_000)
    operations = Operations(driver.engine)
    running = driver.ask(1, [8], start=True, max_tokens=90_000)
    assert running.begun.wait(10)
    draining = threading.Thread(target=lambda: operations.answer({"op": "drain", "timeout_s": 1}))
    draining.start()
    time.sleep(0.2)
    with pytest.raises(FailedPrecondition, match="a drain is under way"):
        operations.answer({"op": "drain", "timeout_s": 1})
    draining.join()


def test_a_session_that_was_to_close_behind_a_turn_that_is_undone_goes_on_elsewhere(
    start: Start, tmp_path: Path
) -> None:
    """Both turns are told to come again there."""
    settings: dict[str, Any] = {"max_context": 100_000, "num_pages": 30_000}
    directory = SnapshotDirectory(tmp_path, ttl_s=60)
    driver = start(snapshots=directory, **settings)
    driver.ask(1, [5], start=True, max_tokens=1).wait()
    running = driver.ask(1, [8], max_tokens=90_000)
    assert running.begun.wait(10)
    end = driver.ask(1, [], end=True)
    assert do(driver, "drain", timeout_s=0.5)["saved"] == 1
    assert (running.wait().code, end.wait().code) == ("UNAVAILABLE", "UNAVAILABLE")
    after = start(snapshots=directory, **settings)
    assert after.ask(1, [8], start=True, resume=True, max_tokens=2).wait().status.context_len == 5
    assert after.ask(1, [], end=True).wait().status.finish_reason == "closed"


def test_sessions_that_cannot_be_saved_are_counted_and_logged(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "sessions"
    driver = start(snapshots=SnapshotDirectory(directory, ttl_s=60))
    for session_id in (1, 2):
        driver.ask(session_id, [5], start=True).wait()
    directory.rmdir()
    assert do(driver, "drain", timeout_s=2) == {"saved": 0, "failed": 2, "with_kv": 0, "moved": 0}
    assert "session 1 is lost: FAILED_PRECONDITION: cannot write" in caplog.text


def test_without_a_directory_a_drain_saves_nothing(driver: ThreadedDriver) -> None:
    assert do(driver, "drain", timeout_s=1) == {"saved": 0, "failed": 1, "with_kv": 0, "moved": 0}
