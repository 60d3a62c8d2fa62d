"""Tests of load_tests.bench.pictures and results: what was measured gets into the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from load_tests.bench import pictures, results
from load_tests.bench.beat_level import Level
from load_tests.bench.serving import OWN_MODES

PNG = b"\x89PNG"
MODES = (*OWN_MODES, "vllm", "llama.cpp q8_0")


@pytest.fixture(autouse=True)
def results_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (results, pictures):
        monkeypatch.setattr(module, "RESULTS_DIR", tmp_path)
    return tmp_path


def test_every_mode_has_a_line_in_the_pictures() -> None:
    runs = {mode: [{1: 10.0, 2: 12.0}, {1: 11.0, 2: 13.0}] for mode in MODES}
    assert pictures.draw_turns("turns", runs, 4, 24).read_bytes().startswith(PNG)
    levels = [[Level(number, [90.0, 250.0], 0, ended_early=False)] * 2 for number in (1, 2)]
    assert pictures.draw_beat("beat", dict.fromkeys(MODES, levels), 0.99).read_bytes().startswith(PNG)


def test_the_clients_cost_is_drawn() -> None:
    drawn = pictures.draw_client_cost("client", [0.5, 0.4], [90.0, 91.0, 92.0], [0.0, 1.0, 2.0])
    assert drawn.read_bytes().startswith(PNG)


def test_no_two_modes_look_alike() -> None:
    colours = pictures._colours(MODES)
    assert len({colours[mode] for mode in MODES}) == len(MODES)


def test_percentiles() -> None:
    values = [float(value) for value in range(101)]
    assert [results.percentile(values, percent) for percent in (50, 90, 99)] == pytest.approx([50, 90, 99])
    assert results.percentile([7.0], 99) == 7.0


def test_a_result_says_where_it_comes_from() -> None:
    written = json.loads(results.write_result("some", {"ms": {1: 2.5}}).read_text())
    assert written["ms"] == {"1": 2.5}
    assert {"date", "machine", "versions", "git"} == set(written["about"])
