"""How far positions reach, and a model whose angles depend on the length of a context beyond a length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from microturn.engine.loading import load_engine
from microturn.errors import InvalidArgument
from microturn.model.positions import num_positions
from microturn.settings import Settings
from support.driver import Driver
from support.families import pristine, pristine_logits, write_family

ORIGINAL = 256
LONGROPE = {
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1] * 4,
        "long_factor": [2.0, 8.0] * 4,
        "original_max_position_embeddings": ORIGINAL,
    },
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "yarn", "factor": 4}}, 2048),
        ({"max_position_embeddings": 2048, **LONGROPE}, ORIGINAL),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
    ],
)
def test_what_a_config_says(config: dict[str, Any], expected: int | None) -> None:
    assert num_positions(config.get) == expected


def test_longrope_is_served_up_to_its_original_context(tmp_path: Path) -> None:
    directory = write_family("phi3", tmp_path / "phi3", **LONGROPE)
    settings = {"model_dir": str(directory), "kv_tokens": 1024, "weights": "float32", "kv_dtype": "float32"}
    runner = load_engine(Settings(**settings, device="cpu")).runner
    driver = Driver(runner, max_context=ORIGINAL)
    ids = torch.randint(1, runner.vocab_size, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    for first in range(0, 240, 60):
        answer = driver.turn(1, ids[first : first + 60], start=first == 0, max_tokens=0 if first < 180 else 16)
    whole = [*ids, *answer.token_ids]
    assert len(whole) == ORIGINAL
    expected = pristine_logits(pristine(directory), whole)
    for position in range(240, ORIGINAL):
        row = expected[position - 1]
        assert row.max() - row[whole[position]] <= 1e-3
    with pytest.raises(InvalidArgument, match=f"at most {ORIGINAL}: in longer contexts the model rotates all keys"):
        load_engine(Settings(**settings, device="cpu", max_context=ORIGINAL + 1))
