"""What a KV cache in 16 or 8 bits costs in quality and gains in room and time.

Quality is the perplexity of a real text, each token predicted from all before it as the cache keeps them
(`perplexity.py`); all types see the same rows. The standard error of the change is that of the mean over paired
differences, one per token. The text is the reference of the Python language that the interpreter carries for `help()`:
prose, tables and code.

Time is that of one decode step of four sessions, step by step in alternation between the types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median

from load_tests.bench import perplexity, texts
from load_tests.bench.results import print_table, write_result
from load_tests.bench.steps import alternating_ms
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KV_DTYPES, KVTensors
from microturn.model import runner, tracing
from microturn.model.batch import Row
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.weights import NotKnown
from microturn.zoo.store import resolve_model

_TYPES = {name: KV_DTYPES[name] for name in ("float32", "bfloat16", "int8")}
_PAGE_SIZE = 16
_NUM_SESSIONS, _NUM_TIMED_STEPS = 4, 40


def run_kv(model_name: str, num_contexts: int, context_len: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model_name: a directory, or the name of an embedded model.
        num_contexts: pieces of the text.
        context_len: tokens of each.
    """
    model_dir = resolve_model(model_name)
    runner.set_num_threads(len(os.sched_getaffinity(0)))
    model = runner.load_model(model_dir)
    layers = tracing.trace_layers(model)
    try:
        decoder = FusedLayers.of(model, layers)
    except NotKnown:
        decoder = None
    num_pages = _NUM_SESSIONS * -(-context_len // _PAGE_SIZE)
    runners = {
        name: runner.ModelRunner(
            model,
            KVTensors(layers, num_pages, _PAGE_SIZE, dtype, layout=PageLayout.PANELS),
            decoder=decoder,
        )
        for name, dtype in _TYPES.items()
    }
    contexts = perplexity.contexts(model_dir, num_contexts, context_len)
    surprises = {name: perplexity.surprises(of_type, contexts, name) for name, of_type in runners.items()}
    step_ms = _decode_ms(runners, context_len - 1)
    exact = surprises["float32"]
    measured = {
        name: {
            "bytes_per_token": KVTensors.bytes_per_token(layers, KV_DTYPES[name]),
            **perplexity.compared(of_type, exact),
            "decode_ms": median(step_ms[name]),
        }
        for name, of_type in surprises.items()
    }
    print(f"\n{num_contexts} contexts of {context_len} tokens; decode steps of {_NUM_SESSIONS} sessions of that length")
    header = ["KV", "bytes per token", "perplexity", "change, %", "decode step, ms"]
    print_table(header, [[name, *_cells(figures)] for name, figures in measured.items()])
    result = {
        "protocol": __doc__,
        "model": model_name,
        "text": texts.NAME,
        "num_contexts": num_contexts,
        "context_len": context_len,
        "num_predicted": exact.numel(),
        "measured": measured,
        "mean_surprise_by_context": {name: of_type.mean(1).tolist() for name, of_type in surprises.items()},
        "decode_ms": step_ms,
    }
    print("written:", write_result("kv", result))


def _cells(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures['bytes_per_token']:,}", *perplexity.cells(figures), f"{figures['decode_ms']:.1f}"]


def _decode_ms(runners: Mapping[str, runner.ModelRunner], position: int) -> dict[str, list[float]]:
    """Milliseconds of steps in which each session computes its token at a position.

    All sessions hold what the first pages hold, in pages of their own.
    """
    num_pages = position // _PAGE_SIZE + 1
    rows = [
        Row([1], position, list(range(session * num_pages, (session + 1) * num_pages)))
        for session in range(_NUM_SESSIONS)
    ]
    for model_runner in runners.values():
        for tensor in (tensor for layer in model_runner.kv.layers for tensor in layer.tensors):
            for session in range(1, _NUM_SESSIONS):
                tensor[session * num_pages : (session + 1) * num_pages] = tensor[:num_pages]
    return alternating_ms(runners, rows, _NUM_TIMED_STEPS)
