"""A model with known traits is prepared as one whose passes told them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from microturn.model import paged_attention as paged
from microturn.model import rotary_fit, tracing
from microturn.model.cpu import stored_model
from microturn.model.rotary import Rotary
from microturn.model.traits import Traits
from support.families import write_family
from support.models_page import PAGE, rows_of

SERVED = [family for family, row in rows_of(PAGE.read_text()).items() if "| refused |" not in row]

# Up to beyond what the models were trained for: some families have other angles there.
POSITIONS = torch.tensor([0, 1, 29, 4000, 100_000])


@pytest.mark.parametrize("family", SERVED)
def test_known_traits_do_what_passes_would(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_family(family, tmp_path / family)
    passed = stored_model.read_model(directory)
    traits = Traits.of(passed, tracing.trace_layers(passed))
    read = Traits.from_json(json.loads(json.dumps(traits.to_json())))
    assert read == traits

    monkeypatch.delattr(rotary_fit, "install")
    known = stored_model.read_model(directory, read)
    assert paged.numbers_of(known) == paged.numbers_of(passed) == list(read.layers)
    assert angles_of(known) == angles_of(passed)
    assert tracing.trace_layers(known) == list(read.layers.values())


def angles_of(model: torch.nn.Module) -> list[object]:
    """Where a model's angles are replaced, and what they are there."""
    return [
        (path, rotary.form, turning, [angle.tolist() for angle in vars(rotation).values() if torch.is_tensor(angle)])
        for path, rotary in model.named_modules()
        if isinstance(rotary, Rotary)
        for turning in rotary.turnings
        for rotation in [rotary.rotation_of(turning, POSITIONS)]
    ]
