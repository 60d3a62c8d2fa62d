"""Tests of preparation: what turns need from elsewhere is fetched beside the engine's thread, in a session's order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from microturn.sessions.inputs import TextInput
from microturn.snapshots.directory import SnapshotDirectory
from microturn.text import encoder
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText
from microturn.zoo.store import resolve_model
from support.by_hand import AllByHand
from support.driver import Recorder
from support.fake_runner import FakeDriver, expected_tokens
from support.snapshots import KEY, RESUME, files, live, saved

# What reads, writes, renames or looks at a file.
CALLS = ("open", "rename", "unlink", "stat", "exists", "iterdir")


class Disk:
    """The calls that concern files below a directory: who makes them; they can be made to hang."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, set[str]] = {}
        self._is_fine = threading.Event()
        self._is_fine.set()
        self.has_hung = threading.Event()
        self._directory = directory
        for name in CALLS:
            monkeypatch.setattr(Path, name, self._watching(name, getattr(Path, name)))

    def hang(self) -> None:
        self._is_fine.clear()

    def recover(self) -> None:
        self._is_fine.set()

    def _watching(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Path, *args: Any, **kwargs: Any) -> Any:
            self._note(name, path)
            return call(path, *args, **kwargs)

        return watched

    def _note(self, name: str, path: Path) -> None:
        if self._directory in path.parents:
            thread = threading.current_thread()
            self.threads.setdefault(name, set()).add(thread.name)
            if not self._is_fine.is_set():
                assert thread is not threading.main_thread(), "everybody waits for the disk"
                self.has_hung.set()
                assert self._is_fine.wait(30)


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path, ttl_s=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The calls are as they were before the engines stop."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk = Disk(tmp_path, monkeypatch)
        yield disk
        disk.recover()


@pytest.fixture
def driver(directory: SnapshotDirectory) -> Iterator[FakeDriver]:
    driver = FakeDriver(max_context=256, snapshots=directory, max_queued_turns=4)
    yield driver
    driver.engine.stop()


@pytest.fixture
def before() -> FakeDriver:
    """The server that has saved its session 1."""
    return FakeDriver(max_context=256)


# ---- saved sessions ------------------------------------------------------------------------------------------------


def test_the_engines_thread_touches_no_snapshot(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory, disk: Disk
) -> None:
    """A START looked into the snapshot directory on the engine's thread: a network disk stalled every session."""
    live(before, **KEY)
    directory.save(saved(before))
    disk.threads.clear()
    assert driver.turn(1, [9], **RESUME).code == "PERMISSION_DENIED"
    assert driver.turn(1, [9], max_tokens=2, **RESUME, **KEY).status.context_len == 17
    assert driver.turn(2, [9], start=True, max_tokens=1).status.context_len == 2
    assert driver.turn(3, [9], **RESUME).code == "NOT_FOUND"
    assert {"open", "rename"} <= set(disk.threads), "nothing was looked for"
    assert threading.current_thread().name not in set().union(*disk.threads.values())


def test_who_is_not_the_owner_has_the_header_read_and_no_more(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each START with a wrong key read and checksummed a whole snapshot, 300 ms for one with many embeddings."""
    live(before, **KEY)
    directory.save(saved(before))
    checksums: list[str] = []
    monkeypatch.setattr("microturn.snapshots.file.hashlib.sha256", lambda *_: checksums.append("computed"))
    assert driver.turn(1, [9], **RESUME).code == "PERMISSION_DENIED"
    assert not checksums


def test_a_disk_that_hangs_holds_nobody_up_but_who_waits_for_it(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory, disk: Disk
) -> None:
    live(before)
    directory.save(saved(before))
    driver.turn(2, [5, 6], start=True, max_tokens=0)
    disk.hang()
    waiting, _ = driver.post(1, [9], max_tokens=2, **RESUME)
    behind, _ = driver.post(1, [10], max_tokens=2)
    driver.steps(1)
    assert disk.has_hung.wait(10)
    other, _ = driver.post(2, [7], max_tokens=3)
    driver.steps(5)
    assert other.token_ids == expected_tokens([5, 6, 7], 3)
    assert not waiting.is_done
    assert not behind.is_done
    disk.recover()
    driver.run()
    assert (waiting.status.context_len, behind.status.context_len) == (17, 20)


def test_a_start_is_answered_though_the_disk_never_is(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory, disk: Disk, tmp_path: Path
) -> None:
    """And when the disk is back, the session is there for the next START, on this server or another."""
    live(before)
    directory.save(saved(before))
    disk.hang()
    waiting, _ = driver.post(1, [9], **RESUME)
    behind, _ = driver.post(1, [10])
    driver.steps(1)
    assert disk.has_hung.wait(10)
    driver.clock.now_s += 60
    driver.steps(1)
    assert waiting.code == "UNAVAILABLE"
    assert behind.code == "NOT_FOUND"
    disk.recover()
    assert driver.turn(1, [9], max_tokens=2, **RESUME).status.context_len == 17
    assert files(tmp_path, ".snapshot") == []


def test_turns_that_wait_for_the_disk_are_bounded(driver: FakeDriver, disk: Disk) -> None:
    disk.hang()
    waiting = [driver.post(1, [number], start=number == 0, max_tokens=0)[0] for number in range(7)]
    driver.steps(1)
    assert [turn.code for turn in waiting] == [None] * 5 + ["RESOURCE_EXHAUSTED"] * 2
    disk.recover()
    driver.run()
    assert [turn.status.context_len for turn in waiting[:5]] == [1, 2, 3, 4, 5]


def test_starts_that_wait_for_the_disk_take_the_places_of_sessions(directory: SnapshotDirectory, disk: Disk) -> None:
    """A claimed session that finds no room would be lost."""
    driver = FakeDriver(snapshots=directory, max_sessions=2)
    disk.hang()
    waiting = [driver.post(number, [1], start=True, max_tokens=0)[0] for number in range(1, 4)]
    driver.steps(1)
    assert [turn.code for turn in waiting] == [None, None, "RESOURCE_EXHAUSTED"]
    disk.recover()
    driver.run()
    assert [turn.status.context_len for turn in waiting[:2]] == [1, 1]
    assert driver.turn(1, end=True).status.finish_reason == "closed"
    assert driver.turn(3, [1], start=True, max_tokens=0).status.context_len == 1
    driver.engine.stop()


def test_two_starts_of_one_id_are_one_after_the_other(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    directory.save(saved(before))
    first, _ = driver.post(1, [9], max_tokens=0, **RESUME)
    second, _ = driver.post(1, [10], max_tokens=0, **RESUME)
    driver.run()
    assert (first.status.context_len, second.status.context_len) == (15, 16)


def test_end_closes_what_was_being_taken_up(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory
) -> None:
    live(before)
    directory.save(saved(before))
    driver.post(1, [9], max_tokens=0, **RESUME)
    end, _ = driver.post(1, end=True)
    driver.run()
    assert end.status.finish_reason == "closed"
    assert driver.turn(1, [9]).code == "NOT_FOUND"


def test_a_deadline_passes_while_the_disk_hangs(driver: FakeDriver, disk: Disk) -> None:
    disk.hang()
    first, _ = driver.post(1, [9], start=True, deadline_ms=100)
    second, _ = driver.post(1, [9], deadline_ms=50)
    driver.steps(1)
    assert disk.has_hung.wait(10)
    driver.clock.now_s += 0.06
    driver.steps(1)
    assert (first.code, second.code) == (None, "DEADLINE_EXCEEDED")
    driver.clock.now_s += 0.06
    driver.steps(1)
    assert first.code == "DEADLINE_EXCEEDED"
    disk.recover()
    driver.run()
    assert driver.turn(1, [9]).code == "NOT_FOUND"


def test_who_leaves_while_the_disk_hangs_opens_nothing(driver: FakeDriver, disk: Disk) -> None:
    disk.hang()
    start, turn = driver.post(1, [9], start=True, max_tokens=0)
    behind, other = driver.post(1, [9], max_tokens=0)
    driver.steps(1)
    assert disk.has_hung.wait(10)
    driver.engine.cancel(other)
    driver.engine.cancel(turn)
    driver.steps(1)
    assert start.is_done
    assert behind.is_done
    disk.recover()
    driver.run()
    assert driver.turn(1, [9]).code == "NOT_FOUND"


def test_a_numbered_start_goes_on_though_its_client_has_left(driver: FakeDriver, disk: Disk) -> None:
    disk.hang()
    start, turn = driver.post(1, [9], start=True, max_tokens=1, turn=0)
    driver.steps(1)
    driver.engine.cancel(turn)
    driver.steps(1)
    assert start.code == "UNAVAILABLE"
    disk.recover()
    driver.run()
    assert len(driver.engine._sessions) == 1
    assert driver.turn(1, [9], start=True, max_tokens=1, turn=0).status.turn == 0
    assert driver.turn(1, [9], start=True, max_tokens=1, turn=0).status.replayed


def test_a_stopping_engine_answers_those_that_wait_and_leaves_the_session_where_it_was(
    before: FakeDriver, driver: FakeDriver, directory: SnapshotDirectory, disk: Disk, tmp_path: Path
) -> None:
    live(before)
    directory.save(saved(before))
    disk.hang()
    waiting = [driver.post(1, [9], **RESUME)[0], driver.post(1, [9])[0]]
    driver.steps(1)
    assert disk.has_hung.wait(10)
    hung = [thread for thread in threading.enumerate() if thread.name.startswith("microturn-snapshots")]
    driver.engine.stop()
    assert [turn.code for turn in waiting] == ["UNAVAILABLE", "UNAVAILABLE"]
    disk.recover()
    for thread in hung:
        thread.join(10)
    assert len(files(tmp_path, ".snapshot")) == 1


# ---- text ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> ModelText:
    return ModelText.from_directory(resolve_model("smollm2-135m"))


LONG = " ".join(f"word{number} and, {number % 7} more." for number in range(100))


class Tokenized:
    """How much text each thread tokenized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chars: dict[str, int] = {}
        encode = encoder._encode

        def count(tokenizer: Any, text: str) -> list[int]:
            name = threading.current_thread().name
            self.num_chars[name] = self.num_chars.get(name, 0) + len(text)
            return encode(tokenizer, text)

        monkeypatch.setattr(encoder, "_encode", count)

    def here(self) -> int:
        """Characters that this thread tokenized since the last time."""
        return self.num_chars.pop(threading.current_thread().name, 0)


def speaking(model: ModelText, **values: Any) -> FakeDriver:
    return FakeDriver(
        max_context=8192,
        num_pages=4096,
        new_codec=partial(SessionText, model),
        prepare_text=model.prepare,
        **values,
    )


def plainly(model: ModelText) -> FakeDriver:
    """Without anything beside the engine's thread."""
    return FakeDriver(max_context=8192, num_pages=4096, new_codec=partial(SessionText, model))


def say(driver: FakeDriver, text: str, **values: Any) -> Recorder:
    return driver.post(1, TextInput(text), return_appended_ids=True, **{"max_tokens": 0, **values})[0]


def test_long_text_is_tokenized_beside_the_engines_thread(model: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text was tokenized on the engine's thread: 100,000 characters held every session up for a tenth of a second."""
    driver, plain = speaking(model), plainly(model)
    tokenized = Tokenized(monkeypatch)
    for number, values in enumerate(
        [
            {"start": True, "role": "system"},
            {"role": "user"},
            {"max_tokens": 3},
            {"parse_special": True, "role": "user", "max_tokens": 2},
        ]
    ):
        text = f"{LONG} <|im_end|> {LONG} and <|im_sta" if number == 3 else LONG
        said = say(driver, text, **values)
        driver.run()
        assert tokenized.here() < 512, values
        expected = say(plain, text, **values)
        plain.run()
        assert tokenized.here() > len(LONG)
        assert said.outputs[-1].appended_ids == expected.outputs[-1].appended_ids
        assert said.token_ids == expected.token_ids
    driver.engine.stop()


def test_turns_behind_a_long_text_keep_their_order(model: ModelText) -> None:
    driver, plain = speaking(model), plainly(model)
    answers = []
    for each in (driver, plain):
        each.turn(1, TextInput("So"), start=True, max_tokens=0)
        turns = [
            say(each, text, max_tokens=number % 2) for number, text in enumerate([" far", LONG, " it", " is", LONG])
        ]
        each.run()
        answers.append([(turn.status.turn, turn.status.context_len, turn.token_ids) for turn in turns])
    assert answers[0] == answers[1]
    driver.engine.stop()


def test_a_long_text_interrupts_when_it_is_tokenized(model: ModelText) -> None:
    driver = speaking(model)
    driver.turn(1, TextInput("So"), start=True, max_tokens=0)
    talking = say(driver, " far", max_tokens=5000)
    driver.steps(3)
    interrupting = say(driver, LONG, on_overlap="interrupt", max_tokens=2)
    driver.run()
    assert talking.status.finish_reason == "interrupted"
    assert len(interrupting.token_ids) == 2
    driver.engine.stop()


def test_a_text_that_is_given_up_while_it_is_tokenized_leaves_nothing_behind(model: ModelText) -> None:
    driver = speaking(model)
    driver.turn(1, TextInput("So"), start=True, max_tokens=0)
    begun, go_on = threading.Event(), threading.Event()
    prepare = model.prepare

    def wait(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return prepare(*args)

    driver.engine._preparation._prepare_text = wait
    late, left = say(driver, LONG, deadline_ms=50), driver.post(1, TextInput(LONG))
    keep_alive, _ = driver.post(1)
    driver.steps(1)
    assert begun.wait(10)
    driver.engine.cancel(left[1])
    driver.clock.now_s += 0.06
    driver.steps(1)
    assert late.code == "DEADLINE_EXCEEDED"
    assert left[0].is_done
    go_on.set()
    driver.run()
    assert keep_alive.status.turn == 1
    assert keep_alive.status.context_len == 0, "text that is held has no ids yet"
    driver.engine.stop()


def test_an_end_closes_though_its_turn_is_given_up_while_it_waits(model: ModelText) -> None:
    """Rule 5 of the contract: END closes the session even when its turn is refused."""
    driver = speaking(model)
    driver.turn(1, TextInput("So"), start=True, max_tokens=0)
    go_on = threading.Event()
    prepare = model.prepare

    def wait(*args: Any) -> Any:
        assert go_on.wait(10)
        return prepare(*args)

    driver.engine._preparation._prepare_text = wait
    first = say(driver, LONG)
    end, _ = driver.post(1, [5], end=True, deadline_ms=50)
    driver.steps(1)
    driver.clock.now_s += 0.06
    driver.steps(1)
    assert end.code == "DEADLINE_EXCEEDED"
    go_on.set()
    driver.run()
    assert first.status.finish_reason == "append"
    assert driver.turn(1, [5]).code == "NOT_FOUND"
    driver.engine.stop()


def test_a_text_that_never_fits_is_counted_beside_the_engines_thread(
    model: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused giant held everybody up for 0.3 s."""
    driver = speaking(model)
    driver.turn(1, TextInput("So"), start=True, max_tokens=0)
    tokenized = Tokenized(monkeypatch)
    giant = say(driver, LONG * 80)
    driver.run()
    assert giant.code == "CONTEXT_FULL"
    assert tokenized.here() < 512
    driver.engine.stop()


def test_tools_are_learnt_beside_the_engines_thread() -> None:
    threads = []

    def new_codec(tools: Any) -> Any:
        from support.driver import IdsOnly

        if tools:
            threads.append(threading.current_thread().name)
        return IdsOnly()

    driver = FakeDriver(new_codec=new_codec)
    driver.turn(1, [1], start=True, tools='[{"name": "f"}]', max_tokens=0)
    assert threads[0].startswith("microturn-text")
    driver.engine.stop()


# ---- without threads -----------------------------------------------------------------------------------------------


def test_what_is_done_beside_the_engine_can_be_done_by_hand(before: FakeDriver, directory: SnapshotDirectory) -> None:
    """So that a simulator has no thread but its own: two STARTs whose files are read in the other order."""
    live(before)
    directory.save(saved(before))
    beside = AllByHand()
    driver = FakeDriver(max_context=256, snapshots=directory, new_background=beside)
    driver.steps(1)
    files_of = beside.of["microturn-snapshots"]
    files_of.do()  # the purge
    first, _ = driver.post(1, [9], max_tokens=0, **RESUME)
    second, _ = driver.post(2, [9], max_tokens=0, start=True)
    driver.steps(3)
    assert len(files_of.jobs) == 2
    files_of.do(1)
    driver.steps(1)
    assert (first.is_done, second.is_done) == (False, True)
    files_of.do()
    driver.run()
    assert first.status.context_len == 15
    driver.engine.stop()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_what_is_taken_up_while_the_server_saves_its_sessions_stays_for_another(
    before: FakeDriver, directory: SnapshotDirectory, tmp_path: Path, is_claimed: bool
) -> None:
    live(before)
    directory.save(saved(before))
    beside = AllByHand()
    driver = FakeDriver(max_context=256, snapshots=directory, new_background=beside)
    driver.steps(1)
    files_of = beside.of["microturn-snapshots"]
    files_of.do()  # the purge
    answer, _ = driver.post(1, [9], **RESUME)
    driver.steps(1)
    maintenance = driver.engine._maintenance
    maintenance.drain()
    assert maintenance.is_busy
    if is_claimed:
        files_of.do()
        assert len(files(tmp_path, ".claimed")) == 1
    assert maintenance.quiesce() == []
    assert answer.code == "UNAVAILABLE"
    if not is_claimed:
        files_of.do()
    driver.steps(1)
    assert not maintenance.is_busy
    assert len(files(tmp_path, ".snapshot")) == 1
    driver.engine.stop()
    after = FakeDriver(max_context=256, snapshots=directory)
    assert after.turn(1, [9], max_tokens=0, **RESUME).status.context_len == 15
    after.engine.stop()
