"""Oracle 7: a session that is restored in another process goes on as it would have gone on here."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from microturn.sessions.environment import next_epoch
from microturn.sessions.inputs import EmbedInput
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from support import models
from support.driver import Driver, model_runner
from support.models import VOCAB_SIZE
from support.snapshot_worker import Heard, Said, go_on, open_driver, talk
from support.snapshots import copied_kv, find, saved
from support.tiers import bits_of

PAGE_SIZE = 16
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "ignore_eos": True}
GREEDY = {"ignore_eos": True}


def said(text: str, max_tokens: int, **options: object) -> Said:
    return Said(text, {"max_tokens": max_tokens, **options})


@dataclass(frozen=True)
class Talk:
    """What is said before a session is saved, and after."""

    before: tuple[Said, ...]
    after: tuple[Said, ...]


TALKS = {
    "greedy": Talk(
        (said("The first thing I do in the", 0, **GREEDY), said(" morning is", 12)), (said("", 8), said(" Then", 8))
    ),
    "sampled, its seed drawn": Talk(
        (said("Once upon a time there", 10, **SAMPLED),), (said("", 12), said(" and the fox", 12))
    ),
    "half a word held back": Talk(
        (said("Yesterday I met an ele", 0, **GREEDY), said("ph", 0)), (said("ant in the gar", 0), said("den, and", 10))
    ),
    "half a word held back, sampled": Talk(
        (said("My favourite colour is vio", 0, **SAMPLED),), (said("let because", 16),)
    ),
    "a message that is open": Talk(
        (said("You are brief.", 0, role="system", **GREEDY), said("What is the capital of Ger", 0, role="user")),
        (said("many?", 0, role="user"), said("", 8, role="assistant"), said("And of France?", 0, role="user")),
    ),
    "cut back to before the snapshot": Talk(
        (said("One two three four five", 6, **SAMPLED), said(" six seven", 6)), (said(" eight", 10, rewind_to=7),)
    ),
    "a window that has slid": Talk(
        (said("Numbers: " + "one, two, three, " * 40, 4, overflow="window", window_tokens=64, **GREEDY),),
        (said(" four", 8), said("", 40), said(" five", 8)),
    ),
    "a turn that is generated to no end": Talk((said("Numbers: 1, 2, 3", 3, **GREEDY),), (said("", 3), said("", 6))),
}


def save(driver: Driver, session_id: SessionId, name: str = "", *, with_kv: bool = False, **state: object) -> None:
    """Saves what a session is now, or something else under another name."""
    snapshot = saved(driver, session_id, epoch=next_epoch())
    header = replace(snapshot.header, session_id=name or session_id)
    snapshot = replace(snapshot, header=header, state={**snapshot.state, **state})
    assert driver.engine.snapshots is not None
    driver.engine.snapshots.save(snapshot)
    if with_kv:
        assert driver.engine.snapshots.add_kv(snapshot, copied_kv(driver, session_id))


def in_another_process(
    model_name: str, directory: Path, sessions: Mapping[str, tuple[Said, ...]]
) -> dict[str, list[Heard]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(go_on, model_name, directory, sessions).result(timeout=300)


# What is left out of some snapshots, to see that the oracle finds it: the seed, and the text that has no ids yet.
SPOILT = {
    "sampled, its seed drawn": {"seed": 1},
    "half a word held back": {"held": {}},
    "a message that is open": {"role": None},
}


@pytest.fixture(scope="module")
def both(real_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """What a model answered here and in another process, there also to snapshots that were spoilt on purpose."""
    directory = tmp_path_factory.mktemp("snapshots")
    driver = open_driver(real_model_dir, directory)
    talks = {name: one for name, one in TALKS.items() if _can_say(real_model_dir, one)}
    spoilt = {name: change for name, change in SPOILT.items() if name in talks}
    for name, one in talks.items():
        talk(driver, name, one.before, start=True)
        save(driver, name)
        save(driver, name, f"with KV: {name}", with_kv=True)
    for name, change in spoilt.items():
        states = saved(driver, name).state["text_states"]
        changed = change if "seed" in change else {"text_states": [{**state, **change} for state in states]}
        save(driver, name, f"spoilt: {name}", **changed)
    sessions = {name: one.after for name, one in talks.items()}
    there = in_another_process(
        real_model_dir,
        directory,
        sessions
        | {f"spoilt: {name}": sessions[name] for name in spoilt}
        | {f"with KV: {name}": sessions[name] for name in sessions},
    )
    return {name: talk(driver, name, turns) for name, turns in sessions.items()}, there


def _can_say(model_dir: str, one: Talk) -> bool:
    """Whether the model has a chat template, if there are roles."""
    has_template = AutoTokenizer.from_pretrained(model_dir).chat_template is not None
    return has_template or not any("role" in said.options for said in one.before)


@pytest.fixture
def name(request: pytest.FixtureRequest, both: tuple[dict, dict]) -> str:
    """Of a talk."""
    if request.param not in both[0]:
        pytest.skip("the model has no chat template")
    name: str = request.param
    return name


@pytest.mark.parametrize("name", TALKS, indirect=True)
def test_a_restored_session_goes_on_identically(both: tuple[dict, dict], name: str) -> None:
    here, there = both
    assert there[name] == here[name]
    assert sum(len(heard.token_ids) for heard in there[name]) >= 6
    assert there[name][-1].context_len > 5


@pytest.mark.parametrize("name", TALKS, indirect=True)
def test_with_its_kv_it_does_so_without_computing_anything_again(both: tuple[dict, dict], name: str) -> None:
    here, there = both
    again = there[f"with KV: {name}"]
    assert again == here[name]
    assert [heard.num_computed for heard in again] == [heard.num_computed for heard in here[name]]
    assert there[name][0].num_computed >= again[0].num_computed


@pytest.mark.parametrize("name", SPOILT, indirect=True)
def test_what_a_snapshot_would_lose_is_found(both: tuple[dict, dict], name: str) -> None:
    here, there = both
    assert there[f"spoilt: {name}"] != here[name]


@pytest.mark.parametrize("model_name", ["int8", "sliding_window"])
def test_ids_and_embeddings_go_on_identically(model_name: str, tmp_path: Path) -> None:
    """Random models, whose tokens depend on every position of the context."""
    rng = random.Random(3)
    driver = open_driver(model_name, tmp_path)

    def ids(num_ids: int, **options: object) -> Said:
        return Said(tuple(rng.choices(range(VOCAB_SIZE), k=num_ids)), options)

    def embeds(num_embeds: int, **options: object) -> Said:
        return Said(tuple(tuple(rng.gauss(0, 1) for _ in range(48)) for _ in range(num_embeds)), options)

    before = [
        ids(40, max_tokens=5, **{**SAMPLED, "temperature": 6.0}),
        embeds(7, max_tokens=3),
        ids(1, max_tokens=9),
        embeds(2, max_tokens=0),
    ]
    after = (ids(3, max_tokens=10), embeds(4, max_tokens=6), ids(2, max_tokens=8, temperature=0))
    talk(driver, "one", before, start=True)
    save(driver, "one")
    there = in_another_process(model_name, tmp_path, {"one": after})["one"]
    assert there == talk(driver, "one", after)
    assert len({token_id for heard in there for token_id in heard.token_ids}) > 5


def test_a_snapshot_is_a_small_part_of_the_kv_that_it_stands_for(smollm2_dir: str, tmp_path: Path) -> None:
    driver = open_driver(smollm2_dir, tmp_path)
    talk(driver, "one", [said("word " * 400, 1)], start=True)
    save(driver, "one")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 10_000


KV_TYPES = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)


@contextmanager
def two_servers(model_name: str, directory: Path, kv_dtype: torch.dtype, **settings: Any) -> Iterator[list[Driver]]:
    """One that saves its sessions, and its successor."""
    model = getattr(models, model_name)()
    drivers = [
        Driver(
            model_runner(model, num_pages=64, page_size=PAGE_SIZE, kv_dtype=kv_dtype),
            num_pages=64,
            page_size=PAGE_SIZE,
            snapshots=SnapshotDirectory(directory, ttl_s=60),
            **settings,
        )
        for _ in range(2)
    ]
    try:
        yield drivers
    finally:
        for driver in drivers:
            driver.engine.stop()


def full_pages(driver: Driver) -> list[bytes]:
    """What stands in the pages of session 1 that are full."""
    table = find(driver).table
    return [bits_of(driver.engine.runner.kv, [page]) for page in table.used_pages[: table.kv_len // PAGE_SIZE]]


def both_go_on(drivers: list[Driver], given: Any, **options: Any) -> None:
    """The same turn to the session and to what was restored of it: the same answer, after the same work."""
    one, other = (driver.turn(1, given, **options) for driver in drivers)
    assert one.token_ids == other.token_ids
    assert one.status.usage == other.status.usage


@KV_TYPES
def test_kv_comes_back_bit_identical(tmp_path: Path, kv_dtype: torch.dtype) -> None:
    rng = random.Random(5)
    with two_servers("grouped_heads", tmp_path, kv_dtype) as (before, after):
        before.turn(1, rng.choices(range(VOCAB_SIZE), k=142), start=True, max_tokens=4, **SAMPLED)
        expected = full_pages(before)
        assert len(expected) == 9
        save(before, 1, with_kv=True)
        after.turn(1, start=True, resume=True)
        both_go_on([before, after], [5], max_tokens=1)
        assert full_pages(after)[:9] == expected
        for _ in range(3):
            both_go_on([before, after], rng.choices(range(VOCAB_SIZE), k=3), max_tokens=5)


def test_a_windows_kv_that_was_fed_with_embeddings_goes_on(tmp_path: Path) -> None:
    """Its cached keys have seen what was evicted: it is they that come back."""
    rng, generator = random.Random(6), torch.Generator().manual_seed(6)
    window = {"overflow": "window", "window_tokens": 32, "sink_tokens": 8}
    with two_servers("grouped_heads", tmp_path, torch.float32, window_slack=16) as (before, after):
        before.turn(1, EmbedInput(torch.randn(60, 48, generator=generator)), start=True, max_tokens=3, **window)
        before.turn(1, rng.choices(range(VOCAB_SIZE), k=40), max_tokens=5)
        assert find(before).num_dropped > 0
        save(before, 1, with_kv=True)
        after.turn(1, start=True, resume=True)
        both_go_on([before, after], rng.choices(range(VOCAB_SIZE), k=3), max_tokens=6, ignore_eos=True)
        both_go_on([before, after], EmbedInput(torch.randn(30, 48, generator=generator)), max_tokens=6)
        length = len(find(before).context)
        both_go_on([before, after], [3], rewind_to=length - 9, max_tokens=6)


@pytest.mark.parametrize("trouble", ["another kv_dtype", "a flipped bit", "cut off"])
def test_kv_that_cannot_be_used_gives_the_same_tokens_later(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    kv_dtype = torch.bfloat16 if trouble == "another kv_dtype" else torch.float32
    given = rng.choices(range(VOCAB_SIZE), k=50)
    with two_servers("grouped_heads", tmp_path, kv_dtype) as (before, _):
        before.turn(1, given, start=True, max_tokens=0)
        save(before, 1, with_kv=True)
    (file,) = tmp_path.glob("*.snapshot")
    content = bytearray(file.read_bytes())
    if trouble != "another kv_dtype":
        content[-100] ^= 16
        file.write_bytes(content if trouble == "a flipped bit" else content[:-100])
    with two_servers("grouped_heads", tmp_path, torch.float32) as (fresh, after):
        expected = fresh.turn("another", given, start=True, max_tokens=8)
        again = after.turn(1, start=True, resume=True, max_tokens=8)
        assert again.token_ids == expected.token_ids
        assert again.status.usage["computed_tokens"] == 57
    assert "recomputed" in caplog.text
