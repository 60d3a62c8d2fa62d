"""Tests of load_tests.bench.gpu: every section runs, here on a CPU with a tiny shape, and its sums are right."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from load_tests.bench.gpu import beat
from load_tests.bench.gpu.beat import largest_on_time, take_level
from load_tests.bench.gpu.card import Card, measure_card
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.picture import draw_found
from load_tests.bench.gpu.report import lines_of, print_found
from load_tests.bench.gpu.roofline import Roofline
from load_tests.bench.gpu.run import SETTINGS, run_shape
from load_tests.bench.gpu.sections import SECTIONS, served, served_from_host, served_in_float8
from load_tests.bench.gpu.steps import grown
from load_tests.bench.gpu.subject import Subject, ready_subject, release
from microturn.engine.engine import Engine

CPU = torch.device("cpu")
TINY = {
    "model_type": "qwen3",
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
KV_BYTES_PER_TOKEN = 2 * 2 * 16 * 4
LITTLE = Extent(
    rows=(1, 3),
    context_lens=(20, 100),
    num_steps=6,
    num_turns=13,
    turn_rows=2,
    num_turns_at=2,
    steady_s=0.2,
    steady_rows=2,
    beat_context_len=30,
    beat_first_rows=2,
    beat_turns=2,
    num_away=14,
    num_in_pool=2,
    num_restored=3,
    num_rounds=5,
)
ON_A_CPU = replace(SETTINGS, weights="float32", attention="torch", kv_tokens=832, max_batch_tokens=128, max_sessions=64)
CARD = Card(read_bytes_per_s=2e9, copy_bytes_per_s=1e9, to_device_bytes_per_s=5e8, to_host_bytes_per_s=5e8)


def test_a_pass_reads_weights_once_and_the_keys_of_all_rows() -> None:
    roofline = Roofline(weight_bytes=1000, kv_bytes_per_token=10, bytes_per_s=1e6)
    assert roofline.pass_ms(num_rows=3, context_len=20) == pytest.approx(1.6)
    # Two passes, over 24 and over 25 tokens.
    assert roofline.turn_ms(3, context_len=20, num_input=4, num_output=2) == pytest.approx(1.72 + 1.75)


def test_a_turn_of_llama_8b_on_an_h200_takes_what_the_issue_says() -> None:
    roofline = Roofline(
        weight_bytes=2 * (8_030_261_248 - 128_256 * 4096), kv_bytes_per_token=131_072, bytes_per_s=4.8e12
    )
    assert roofline.pass_ms(1, 0) == pytest.approx(3.13, abs=0.01)
    assert roofline.turn_ms(4, 24 * 299, 16, 8) == pytest.approx(31.3, abs=0.1)


def test_what_memory_gives_is_the_most_that_was_seen() -> None:
    assert CARD.memory_bytes_per_s == 2e9
    assert replace(CARD, copy_bytes_per_s=3e9).memory_bytes_per_s == 3e9
    measured = measure_card(CPU, num_bytes=1 << 22, num_host_bytes=1 << 20)
    assert measured.to_host_bytes_per_s > 1e7
    assert 1e8 < measured.memory_bytes_per_s < 1e13


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 5, 17, 64, 100, 418, 500])
def test_the_largest_number_is_found_nearly_and_in_few_levels(capacity: int) -> None:
    asked: list[int] = []

    def is_on_time(number: int) -> bool:
        asked.append(number)
        return number <= capacity

    found = largest_on_time(is_on_time, first=64, most=418)
    capacity = min(capacity, 418)
    assert capacity - max(0, capacity // 16) <= found <= capacity
    assert len(asked) == len(set(asked)) <= 11
    assert 1 <= min(asked) <= max(asked) <= 418


def test_every_section_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_shape("tiny", TINY, list(SECTIONS), CPU, CARD, tmp_path, settings=ON_A_CPU, extent=LITTLE)
    assert list(found) == list(SECTIONS)
    assert not [result["error"] for result in found.values() if "error" in result]
    written = json.loads((tmp_path / "gpu-tiny.json").read_text())
    assert written["sections"] == json.loads(json.dumps(found))
    assert written["card"]["read_bytes_per_s"] == 2e9
    assert {"date", "machine", "versions", "git"} <= set(written["about"])

    memory = found["memory"]
    assert memory["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN
    assert memory["page_bytes"] == (832 + 16) * KV_BYTES_PER_TOKEN
    assert memory["num_pool_tokens"] == 832

    for step in found["decode"]["steps"]:
        floor_ms = (
            memory["pass_weight_bytes"] + step["num_rows"] * (step["context_len"] + 11) * KV_BYTES_PER_TOKEN
        ) / 2e6
        assert step["floor_ms"] == pytest.approx(floor_ms)
        assert step["of_roofline"] == pytest.approx(floor_ms / step["p50_ms"])
    assert [(step["num_rows"], step["context_len"]) for step in found["decode"]["steps"]] == [
        (1, 20),
        (3, 20),
        (1, 100),
        (3, 100),
    ]

    run = found["turns"]["run"]
    assert run["num_turns"] == 13
    assert len(run["ms"]) == len(run["floor_ms"]) == 12
    assert run["last_of_roofline"] == pytest.approx(sum(run["floor_ms"][-10:]) / sum(run["ms"][-10:]), rel=0.05)
    assert found["float8-decode"]["steps"][0]["floor_ms"] < found["decode"]["steps"][0]["floor_ms"]

    assert found["steady"]["num_steps"] >= 256
    assert found["steady"]["p99_over_p50"] >= 1

    assert found["beat"]["sessions_on_time"] <= 13
    assert found["beat"]["levels"][0]["num_turns"] == found["beat"]["levels"][0]["num_sessions"] * 2

    assert sum(kernel["share"] for kernel in found["kernels"]["kernels"]) <= 1.001
    assert found["kernels"]["kernels"][0]["us_each"] > 0

    sampling = found["sampling"]
    assert (sampling["num_rows"], sampling["context_len"], sampling["vocab_size"]) == (3, 20, 150)
    assert list(sampling["kinds"]) == ["greedy", "top_p", "top_k"]
    assert sampling["kinds"]["greedy"]["over_greedy"] == 1
    assert min(kind[part] for kind in sampling["kinds"].values() for part in ("p50_ms", "draw_ms", "host_ms")) > 0

    restore = found["restore"]
    assert restore["num_bytes"] == 112 * KV_BYTES_PER_TOKEN
    assert restore["copy_ms"] == pytest.approx(restore["num_bytes"] / 5e5)
    assert len(restore["restore_ms"]) == 3
    assert min(restore["restore_ms"]) > 0
    assert restore["beat"]["num_turns"] == 14

    print_found("tiny", found)
    assert "failed" not in capsys.readouterr().out
    draw_found("tiny", found, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").stat().st_size > 10_000


def test_what_does_not_fit_the_pool_is_left_out(tmp_path: Path) -> None:
    wide = replace(LITTLE, rows=(1, 20), context_lens=(100,))
    found = run_shape("tiny", TINY, ["decode"], CPU, CARD, tmp_path, settings=ON_A_CPU, extent=wide)
    lines = list(lines_of("decode", found["decode"]))
    assert lines[0][2].endswith("%")
    assert lines[1] == ("decode, 20 at 100", "the pool is too small", "")


def test_a_section_that_fails_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_shape("tiny", TINY, ["memory"], CPU, CARD, tmp_path, settings=ON_A_CPU, extent=LITTLE)

    def fail(*_: object) -> dict[str, object]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(SECTIONS, "turns", replace(SECTIONS["turns"], measure=fail))
    names = ["decode", "turns", "steady"]
    found = run_shape("tiny", TINY, names, CPU, CARD, tmp_path, settings=ON_A_CPU, extent=LITTLE)
    assert set(found) == {"memory", "decode", "turns", "steady"}
    assert found["turns"]["error"] == "RuntimeError: an illegal memory access"
    assert "p99_ms" in found["steady"]
    assert json.loads((tmp_path / "gpu-tiny.json").read_text())["sections"]["turns"] == found["turns"]
    assert list(lines_of("turns", found["turns"])) == [("turns", "failed: RuntimeError: an illegal memory access", "")]


def test_a_model_that_cannot_be_made_fails_its_sections_once(tmp_path: Path) -> None:
    config = {**TINY, "num_hidden_layers": 0}
    found = run_shape("none", config, ["decode", "steady"], CPU, CARD, tmp_path, settings=ON_A_CPU, extent=LITTLE)
    assert all("error" in found[name] for name in ("decode", "steady"))


def test_an_engine_that_breaks_on_its_thread_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> bool:
        raise RuntimeError("broken")

    with ready_subject(TINY, served(ON_A_CPU, LITTLE), CPU, CARD) as subject:
        ids = grown(subject.sessions, 2, 30)
        monkeypatch.setattr(Engine, "step", break_down)
        with pytest.raises(RuntimeError, match="broken"):
            take_level(subject.sessions, ids, num_turns=2, beat_s=0.01)


@pytest.fixture
def subject() -> Subject:
    with ready_subject(TINY, served(ON_A_CPU, LITTLE), CPU, CARD) as ready:
        yield ready


def test_nothing_of_an_engine_stays_in_memory() -> None:
    """The next one's pool is what is left of the card's."""
    with ready_subject(TINY, served(ON_A_CPU, LITTLE), CPU, CARD) as subject:
        ids = grown(subject.sessions, 2, 30)
        take_level(subject.sessions, ids, num_turns=1, beat_s=0.01)
        runner = subject.loaded.runner
        kept = [weakref.ref(tensor) for tensor in (runner.kv.layers[0].elements, runner.model.lm_head.weight)]
    del subject, runner
    release(CPU)
    assert [ref() for ref in kept] == [None, None]


def test_a_level_counts_every_turn_from_when_it_was_due(subject: Subject) -> None:
    ids = grown(subject.sessions, 3, 30)
    level = take_level(subject.sessions, ids, num_turns=4)
    assert len(level.latencies_ms) == 12
    assert level.num_unanswered == 0
    assert not level.ended_early
    assert min(level.latencies_ms) > 0
    subject.sessions.engine.check_integrity()


def test_a_level_that_cannot_be_kept_ends_early(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat, "BEHIND_S", 0.02)
    ids = grown(subject.sessions, 3, 30)
    level = take_level(subject.sessions, ids, num_turns=1000, beat_s=0.002)
    assert level.ended_early
    assert level.on_time_share < 0.5


def test_sessions_are_as_long_as_they_are_grown_whatever_they_did_since(subject: Subject) -> None:
    for context_len in (50, 50, 20, 80):
        grown(subject.sessions, 2, context_len)
        take_level(subject.sessions, [1, 2], num_turns=1, beat_s=0.01)
        subject.sessions.engine.check_integrity()


def test_engines_have_room_for_what_is_measured() -> None:
    extent = Extent()
    longest = max(*extent.context_lens, 24 * extent.num_turns)
    assert served(SETTINGS, extent).max_context > longest + 24 * (extent.num_turns_at + 1)
    assert served_in_float8(SETTINGS, extent).kv_dtype == "float8"
    small = served_from_host(SETTINGS, extent)
    # What parked sessions leave free must hold one that comes back.
    assert small.kv_tokens / 8 > max(extent.context_lens)
    assert extent.num_away * max(extent.context_lens) > 1.5 * small.kv_tokens


def test_less_can_be_measured() -> None:
    extent = Extent.of(["rows=8,64", "steady_s=20", "num_turns=30"])
    assert (extent.rows, extent.steady_s, extent.num_turns) == ((8, 64), 20.0, 30)
    assert extent.context_lens == Extent().context_lens
    for setting in ("row=8", "rows=many", "rows"):
        with pytest.raises(ValueError, match=setting.partition("=")[0]):
            Extent.of([setting])
