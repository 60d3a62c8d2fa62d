"""How the model families with fast layers decode: their time for the bytes that a step must read, beside Llama's.

All have random weights and SmolLM2-135M's sizes; a mixture has eight experts in the place of each gated block, two of
which compute a token. Llama, which SmolLM2 is, shows how fast this machine reads weights in such a step. A family's
ratio is that of times over that of bytes: with 1 it pays for nothing but the weights that it reads.

Time is that of one decode step of one session with a new random token, in alternation between families.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from load_tests.bench.results import print_table, write_result
from microturn.kv.layer_groups import LayerGroups
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model import runner, tracing
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import release_linears
from microturn.model.products import Products

_SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1536}
# What a family needs besides; the first is what the others are compared with.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "vaultgemma": {},
    "phi3": {},
    "smollm3": {},
    "granite": {},
    "glm": {},
    "glm4": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "helium": {},
    "olmo2": {},
    "olmo3": {},
    "mixtral": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 1536},
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "flex_olmo": _EXPERTS,
}
_TYPES: Mapping[str, Products] = {"int8": Int8Linear, "float32": Linear}
_PAGE_SIZE = 16
_NUM_WARM_UP_STEPS = 5


def run_families(families: Sequence[str], num_steps: int, weights: str) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        families: by their `model_type`; all if there are none.
        num_steps: of each.
        weights: their type, ``int8`` or ``float32``.
    """
    num_threads = len(os.sched_getaffinity(0))
    runner.set_num_threads(num_threads)
    reference, *others = _FAMILIES
    names = [reference, *(family for family in others if not families or family in families)]
    runners = {name: _runner(name, num_steps, weights) for name in tqdm(names, desc="models", leave=False)}
    weight_bytes = {name: _layers_of(of_family).weight_bytes for name, of_family in runners.items()}
    step_ms = _step_ms(runners, num_steps)
    medians = {name: median(of_family) for name, of_family in step_ms.items()}
    ratios = {
        name: (medians[name] / medians[reference]) / (weight_bytes[name] / weight_bytes[reference]) for name in names
    }
    print(f"\ndecode steps of one session, {num_steps} each, weights in {weights}")
    rows = [
        [name, f"{ratios[name]:.2f}", f"{medians[name]:.2f}", _spread(step_ms[name]), f"{weight_bytes[name]:,}"]
        for name in names
    ]
    print_table(["family", "time for its bytes, of Llama's", "median, ms", "quartiles, ms", "bytes read"], rows)
    result = {
        "protocol": __doc__,
        "sizes": _SIZES,
        "experts": _EXPERTS,
        "weights": weights,
        "num_threads": num_threads,
        "ratios": ratios,
        "weight_bytes": weight_bytes,
        "median_step_ms": medians,
        "step_ms": step_ms,
    }
    print("written:", write_result("families" if weights == "int8" else f"families-{weights}", result))


def _runner(family: str, num_tokens: int, weights: str) -> runner.ModelRunner:
    """A runner with pages for so many tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES, **_FAMILIES[family])
    model = runner.prepare_model(AutoModelForCausalLM.from_config(config).eval(), "cpu")
    layers = tracing.trace_layers(model)
    decoder = FusedLayers.of(model, layers, _TYPES[weights])
    if weights == "int8":
        release_linears(model)
    num_pages = LayerGroups.of(layers).num_groups * ((_NUM_WARM_UP_STEPS + num_tokens) // _PAGE_SIZE + 1)
    kv = KVTensors(layers, num_pages, _PAGE_SIZE, layout=PageLayout.PANELS)
    return runner.ModelRunner(model, kv, decoder=decoder)


def _row(token_id: int, position: int, kv: KVTensors) -> Row:
    """The next token of the only session; each kind of layers has its share of the pages."""
    num_pages, firsts = position // _PAGE_SIZE + 1, accumulate((kind.num_groups for kind in kv.groups.kinds), initial=0)
    num_most = kv.num_pages // kv.groups.num_groups
    first, *others = (
        RowPages([first * num_most + page for page in range(num_pages * kind.num_groups)])
        for first, kind in zip(firsts, kv.groups.kinds, strict=False)
    )
    return Row([token_id], position, first.pages, others=others)


def _layers_of(of_family: runner.ModelRunner) -> FusedLayers:
    assert isinstance(of_family.decoder, FusedLayers)
    return of_family.decoder


def _step_ms(runners: Mapping[str, runner.ModelRunner], num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps in which a session decodes, by family."""
    num_all = _NUM_WARM_UP_STEPS + num_steps
    ids = torch.randint(49152, (num_all,), generator=torch.Generator().manual_seed(0)).tolist()
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for position, token_id in enumerate(tqdm(ids, desc="steps", leave=False)):
        for name, of_family in runners.items():
            batch = Batch([_row(token_id, position, of_family.kv)])
            started_s = time.perf_counter()
            of_family.run(batch)
            samples[name].append((time.perf_counter() - started_s) * 1e3)
    return {name: of_family[_NUM_WARM_UP_STEPS:] for name, of_family in samples.items()}


def _spread(samples: Sequence[float]) -> str:
    low, _, high = quantiles(samples, n=4)
    return f"{low:.2f} to {high:.2f}"
