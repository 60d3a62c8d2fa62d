"""What weights in 8 bits cost in quality and gain in bytes and time.

Quality is the perplexity of a real text, each token predicted from all before it (`perplexity.py`); both types see the
same rows. The standard error of the change is that of the mean over paired differences, one per token.

Time is that of one step, in alternation between the types: sessions that each decode a token, or one session that
appends several, all behind as many tokens of context.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median

from torch import Tensor

from load_tests.bench import perplexity, texts
from load_tests.bench.results import print_table, write_result
from load_tests.bench.steps import alternating_ms
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model import runner, tracing
from microturn.model.batch import Row
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import NotKnown
from microturn.model.products import Products
from microturn.zoo.store import resolve_model

_PAGE_SIZE = 16
_TYPES: Mapping[str, Products] = {"float32": Linear, "int8": Int8Linear}
_TIMED_CONTEXT_LEN, _NUM_TIMED_STEPS = 400, 15
_NUM_SESSIONS, _NUM_APPENDED = (1, 4, 8, 16, 64), (4, 16, 64, 256)


def run_weights(model_name: str, num_contexts: int, context_len: int) -> None:
    """Measures, prints tables and writes a JSON file.

    Args:
        model_name: a directory, or the name of an embedded model.
        num_contexts: pieces of the text.
        context_len: tokens of each.
    """
    model_dir = resolve_model(model_name)
    runner.set_num_threads(len(os.sched_getaffinity(0)))
    model = runner.load_model(model_dir)
    layers = tracing.trace_layers(model)
    pages_of_one = -(-(_TIMED_CONTEXT_LEN + max(_NUM_APPENDED)) // _PAGE_SIZE)
    num_pages = max(max(_NUM_SESSIONS) * pages_of_one, -(-context_len // _PAGE_SIZE))
    kv = KVTensors(layers, num_pages, _PAGE_SIZE, layout=PageLayout.PANELS)
    runners, weight_bytes = {}, {}
    for name, products in _TYPES.items():
        try:
            decoder = FusedLayers.of(model, layers, products)
        except NotKnown as reason:
            raise SystemExit(f"{model_name} runs on transformers' layers, whose weights stay: {reason}") from None
        runners[name] = runner.ModelRunner(model, kv, decoder=decoder)
        weight_bytes[name] = decoder.weight_bytes

    pieces = perplexity.contexts(model_dir, num_contexts, context_len)
    surprises: dict[str, Tensor] = {name: perplexity.surprises(of, pieces, name) for name, of in runners.items()}
    measured = {
        name: {"weight_bytes": weight_bytes[name], **perplexity.compared(of_type, surprises["float32"])}
        for name, of_type in surprises.items()
    }
    steps = {f"{num} sessions decode" if num > 1 else "1 session decodes": (num, 1) for num in _NUM_SESSIONS}
    steps |= {f"1 session appends {num_tokens}": (1, num_tokens) for num_tokens in _NUM_APPENDED}
    step_ms = {name: _step_ms(runners, *shape, pages_of_one) for name, shape in steps.items()}

    print(f"\n{num_contexts} contexts of {context_len} tokens")
    print_table(
        ["weights", "bytes", "perplexity", "change, %"],
        [[name, f"{figures['weight_bytes']:,}", *perplexity.cells(figures)] for name, figures in measured.items()],
    )
    print(f"\nmedian milliseconds of a step, behind {_TIMED_CONTEXT_LEN} tokens")
    print_table(["step", *_TYPES], [[step, *(median(ms[name]) for name in _TYPES)] for step, ms in step_ms.items()])
    result = {
        "protocol": __doc__,
        "model": model_name,
        "text": texts.NAME,
        "num_contexts": num_contexts,
        "context_len": context_len,
        "num_predicted": surprises["float32"].numel(),
        "measured": measured,
        "median_step_ms": {step: {name: median(ms[name]) for name in _TYPES} for step, ms in step_ms.items()},
        "step_ms": step_ms,
    }
    print("written:", write_result("weights", result))


def _step_ms(
    runners: Mapping[str, runner.ModelRunner], num_sessions: int, num_tokens: int, pages_of_one: int
) -> dict[str, list[float]]:
    """Milliseconds of steps in which each session computes so many tokens."""
    num_pages = -(-(_TIMED_CONTEXT_LEN + num_tokens) // _PAGE_SIZE)
    firsts = [session * pages_of_one for session in range(num_sessions)]
    rows = [Row([1] * num_tokens, _TIMED_CONTEXT_LEN, list(range(first, first + num_pages))) for first in firsts]
    return alternating_ms(runners, rows, _NUM_TIMED_STEPS)
