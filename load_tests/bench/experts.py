"""How a mixture of experts decodes: its time for the bytes that a step must read, beside a dense model's.

Both models have random weights and SmolLM2-135M's sizes, one with eight experts in the place of each gated block, two
of which compute a token. The dense model shows how fast this machine reads weights in such a step. The ratio is that of
times over that of bytes: with 1 the chosen experts cost what their bytes do, and nothing is paid for the others.

Time is that of one decode step of one session with a new random token, in alternation between models and types of
weights. What transformers' own layers take for the mixture is measured after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from statistics import median, quantiles

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from load_tests.bench.results import print_table, write_result
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model import runner
from microturn.model.batch import Batch, Row
from microturn.model.cpu.feed_forward import Products
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear

_SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
_NUM_EXPERTS, _NUM_CHOSEN = 8, 2
_TYPES: Mapping[str, Products] = {"int8": Int8Linear, "float32": Linear}
_PAGE_SIZE = 16
_NUM_WARM_UP_STEPS = 5


def run_experts(num_steps: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        num_steps: of each model.
    """
    num_threads = len(os.sched_getaffinity(0))
    runner.set_num_threads(num_threads)
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**_SIZES))
    mixture = MixtralForCausalLM(
        MixtralConfig(**_SIZES, num_local_experts=_NUM_EXPERTS, num_experts_per_tok=_NUM_CHOSEN)
    )
    runners, weight_bytes = {}, {}
    for name, model in (("dense", dense), ("mixture", mixture)):
        for of_type, products in _TYPES.items():
            of_model = _runner(model, num_steps, products)
            assert isinstance(of_model.decoder, FusedLayers)
            runners[f"{name}, {of_type}"] = of_model
            weight_bytes[f"{name}, {of_type}"] = of_model.decoder.weight_bytes
    step_ms = _step_ms(runners, num_steps)
    step_ms |= _step_ms({"mixture, transformers' layers": _runner(mixture, num_steps, None)}, num_steps)
    medians = {name: median(of_model) for name, of_model in step_ms.items()}
    ratios = {
        of_type: (medians[f"mixture, {of_type}"] / medians[f"dense, {of_type}"])
        / (weight_bytes[f"mixture, {of_type}"] / weight_bytes[f"dense, {of_type}"])
        for of_type in _TYPES
    }
    print("\ntime for the bytes of a step, of a mixture's over a dense model's")
    print_table(["weights", "ratio"], [[of_type, f"{ratio:.2f}"] for of_type, ratio in ratios.items()])
    print(f"\ndecode steps of one session, {num_steps} each")
    rows = [[name, f"{medians[name]:.2f}", _spread(of_model)] for name, of_model in step_ms.items()]
    print_table(["model", "median, ms", "quartiles, ms"], rows)
    result = {
        "protocol": __doc__,
        "sizes": _SIZES,
        "num_threads": num_threads,
        "num_experts": _NUM_EXPERTS,
        "num_chosen": _NUM_CHOSEN,
        "ratios": ratios,
        "weight_bytes": weight_bytes,
        "median_step_ms": medians,
        "step_ms": step_ms,
    }
    print("written:", write_result("experts", result))


def _runner(model: PreTrainedModel, num_tokens: int, products: Products | None) -> runner.ModelRunner:
    """A runner with pages for so many tokens; without products it has transformers' own layers."""
    if model.training:
        runner.prepare_model(model.eval(), "cpu")
    layers = runner.trace_layers(model)
    decoder = None if products is None else FusedLayers.of(model, layers, products)
    num_pages = (_NUM_WARM_UP_STEPS + num_tokens) // _PAGE_SIZE + 1
    kv = KVTensors(layers, num_pages, _PAGE_SIZE, layout=PageLayout.PANELS)
    return runner.ModelRunner(model, kv, decoder=decoder)


def _step_ms(runners: Mapping[str, runner.ModelRunner], num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps in which a session decodes, by runner."""
    num_all = _NUM_WARM_UP_STEPS + num_steps
    ids = torch.randint(_SIZES["vocab_size"], (num_all,), generator=torch.Generator().manual_seed(0)).tolist()
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for position, token_id in enumerate(tqdm(ids, desc="steps", leave=False)):
        pages = list(range(position // _PAGE_SIZE + 1))
        for name, of_model in runners.items():
            started_s = time.perf_counter()
            of_model.run(Batch([Row([token_id], position, pages)]))
            samples[name].append((time.perf_counter() - started_s) * 1e3)
    return {name: of_model[_NUM_WARM_UP_STEPS:] for name, of_model in samples.items()}


def _spread(samples: list[float]) -> str:
    low, _, high = quantiles(samples, n=4)
    return f"{low:.2f} to {high:.2f}"
