"""Tests of `lean_imports`, each in a process of its own: an import happens once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from microturn.model import runner
from microturn.model.stock import stock_logits
from support.families import write_family

PREAMBLE = """
import json, sys
from microturn.model.lean_imports import import_transformers
import_transformers()
import torch
left_out = {"torch._dynamo", "torch.distributed.tensor", "sympy"}
"""
IDS = [5, 3, 8]


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=without_gpu, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout


@pytest.mark.parametrize(
    ("family", "asks_for_it"),
    [("llama", False), ("gemma3_text", False), ("qwen3_5_text", True)],  # a recurrent state is marked for the compiler
)
def test_a_model_is_loaded_and_computes_without_what_is_left_out(
    family: str, asks_for_it: bool, tmp_path: Path
) -> None:
    directory = write_family(family, tmp_path / family)
    script = """
from microturn.engine import loading  # all that a server imports
from microturn.model.cpu import stored_model
from microturn.model.stock import stock_logits
from microturn.settings import Settings

loading.load_engine(Settings.from_strings({"model_dir": sys.argv[1], "num_threads": "1"}))
print(json.dumps(stock_logits(stored_model.read_model(sys.argv[1]), json.loads(sys.argv[2])).tolist()))
print(json.dumps(sorted(left_out & set(sys.modules))))
"""
    logits, imported = map(json.loads, run(script, directory, IDS).splitlines()[-2:])
    assert logits == stock_logits(runner.load_model(directory), IDS).tolist()
    assert bool(imported) == asks_for_it, imported


def test_who_asks_the_compiler_for_more_than_marks_gets_it() -> None:
    script = """
import importlib
from microturn.model import lean_imports
stand_in = lean_imports._Compiler("torch._dynamo")
sys.modules |= {"torch._dynamo": stand_in, lean_imports._TRACED: stand_in}
@torch.compiler.disable
def marked(): return "marked"
print(marked(), hasattr(stand_in, "__file__"), "sympy" in sys.modules)
print(stand_in.config is importlib.import_module("torch._dynamo").config, torch._dynamo is stand_in)
"""
    assert run(script).splitlines() == ["marked False False", "True False"]


def test_what_is_left_out_can_be_used_later() -> None:
    script = """
assert not left_out & set(sys.modules)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist(), torch.distributed.is_available())
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    print(torch.vmap(lambda i: torch.arange(5)[i])(torch.tensor([2, 4])).tolist())
from transformers.models import qwen3
print(qwen3.Qwen3Config.model_type)
"""
    assert run(script).splitlines() == ["[2.0, 2.0] True", "[2, 4]", "qwen3"]
