"""Oracle 7: a session that is restored in another process goes on as it would have gone on here."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from microturn.snapshots.snapshot import next_epoch
from support.driver import Driver
from support.models import VOCAB_SIZE
from support.snapshot_worker import Heard, Said, go_on, open_driver, talk
from support.snapshots import saved

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


def save(driver: Driver, session_id: str, name: str = "", **state: object) -> None:
    """Saves what a session is now, or something else under another name."""
    snapshot = saved(driver, session_id, epoch=next_epoch())
    header = replace(snapshot.header, session_id=name or session_id)
    assert driver.engine.snapshots is not None
    driver.engine.snapshots.save(replace(snapshot, header=header, state={**snapshot.state, **state}))


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
def both(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """What SmolLM2 answered here and in another process, there also to snapshots that were spoilt on purpose."""
    directory = tmp_path_factory.mktemp("snapshots")
    driver = open_driver(smollm2_dir, directory)
    for name, one in TALKS.items():
        talk(driver, name, one.before, start=True)
        save(driver, name)
    for name, change in SPOILT.items():
        states = saved(driver, name).state["text_states"]
        changed = change if "seed" in change else {"text_states": [{**state, **change} for state in states]}
        save(driver, name, f"spoilt: {name}", **changed)
    sessions = {name: one.after for name, one in TALKS.items()}
    there = in_another_process(
        smollm2_dir, directory, sessions | {f"spoilt: {name}": sessions[name] for name in SPOILT}
    )
    return {name: talk(driver, name, turns) for name, turns in sessions.items()}, there


@pytest.mark.parametrize("name", TALKS)
def test_a_restored_session_goes_on_identically(both: tuple[dict, dict], name: str) -> None:
    here, there = both
    assert there[name] == here[name]
    assert sum(len(heard.token_ids) for heard in there[name]) >= 6
    assert there[name][-1].context_len > 5


@pytest.mark.parametrize("name", SPOILT)
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
