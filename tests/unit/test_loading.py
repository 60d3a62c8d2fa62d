"""Tests of loading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from microturn import loading
from microturn.batch import Batch, Row
from microturn.settings import Settings
from microturn.text.model_text import ModelText


def test_a_pool_that_sizes_itself_counts_in_the_type_of_its_pages(
    smollm2_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 has 30 layers of 3 heads of 64, in int8 with a scale of 4 bytes; half of what is free is taken."""
    token_bytes = 30 * 2 * 3 * (64 + 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 1000 * token_bytes))
    engine = loading.load_engine(Settings(model_dir=smollm2_dir, kv_dtype="int8"))
    assert engine.max_context == 1000
    last_layer = engine.runner.kv.layers[29]
    assert last_layer.elements.dtype == torch.int8
    assert [tensor.shape for tensor in last_layer.tensors] == [(63, 2, 16, 3, 64), (63, 2, 16, 3)]
    encode = ModelText.from_directory(Path(smollm2_dir)).encoder.encode
    logits = engine.runner.run(Batch([Row(encode("The capital of France is", begins=True), 0, [62])]))
    assert [int(logits.argmax())] == encode(" Paris", begins=False)
