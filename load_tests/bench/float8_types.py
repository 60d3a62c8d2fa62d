"""What 8-bit floats (e4m3) cost in quality, as a GPU multiplies them.

Quality is the perplexity of a real text, each token predicted from all before it (`perplexity.py`); all types see the
same rows. The standard error of the change is that of the mean over paired differences, one per token.

It is measured on a CPU, in float32: weights and inputs of products are rounded to 8-bit floats and back, or keys and
values are. That leaves out the rounding of sums and of all else to bfloat16, which a GPU has besides; times would say
nothing. The head and the embeddings are not rounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from load_tests.bench import perplexity, texts
from load_tests.bench.results import print_table, write_result
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model import runner, tracing
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.linear import Linear
from microturn.model.gpu import float8
from microturn.model.gpu.kv_scales import measured_scales
from microturn.model.products import Products, TorchLinear, stacked
from microturn.zoo.store import resolve_model

_PAGE_SIZE = 16
_EXACT = "none"


@dataclass(frozen=True)
class _Rounding:
    """`Products` of rounded weights and inputs.

    Attributes:
        head: of the model, which is not rounded.
        block: inputs that have a scale in common; None for all of a row.
        of_inputs: whether inputs are rounded too.
    """

    head: nn.Linear
    block: int | None
    of_inputs: bool = True

    def __call__(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        rounded = float8.decode(*float8.quantize(weight, self.block or weight.shape[1]))
        return _RoundedInputs(rounded, bias, self.block) if self.of_inputs else TorchLinear(rounded, bias)

    def fused(self, modules: Sequence[nn.Linear]) -> TorchLinear:
        return self(*stacked(modules))

    def of(self, module: nn.Linear) -> TorchLinear:
        return TorchLinear.of(module) if module is self.head else self.fused([module])


class _RoundedInputs(TorchLinear):
    """A product whose inputs are rounded."""

    def __init__(self, weight: Tensor, bias: Tensor | None, block: int | None) -> None:
        super().__init__(weight, bias)
        self._block = block

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return super().__call__(float8.decode(*float8.quantize(x, self._block or x.shape[1])), out)


def _types(head: nn.Linear) -> Mapping[str, Products]:
    return {
        _EXACT: Linear,
        "weights and inputs, a scale for each row": _Rounding(head, None),
        "weights alone, a scale for each row": _Rounding(head, None, of_inputs=False),
        "weights and inputs, a scale for each block of 64": _Rounding(head, 64),
    }


@torch.inference_mode()
def run_float8(model_name: str, num_contexts: int, context_len: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model_name: a directory, or the name of an embedded model; its products have whole blocks of 64 inputs.
        num_contexts: pieces of the text.
        context_len: tokens of each.
    """
    model_dir = resolve_model(model_name)
    runner.set_num_threads(len(os.sched_getaffinity(0)))
    model = runner.load_model(model_dir)
    layers = tracing.trace_layers(model)
    new_pages = partial(KVTensors, layers, -(-context_len // _PAGE_SIZE), _PAGE_SIZE)
    pages = new_pages(layout=PageLayout.PANELS)
    runners = {
        name: runner.ModelRunner(model, pages, decoder=FusedLayers.of(model, layers, products))
        for name, products in _types(model.lm_head).items()
    }
    exact = runners[_EXACT].decoder
    for name, scales in (("KV, unscaled", None), ("KV, measured scales", measured_scales(model, layers))):
        float8_pages = new_pages(torch.float8_e4m3fn, float8=scales)
        runners[name] = runner.ModelRunner(model, float8_pages, decoder=exact)
    pieces = perplexity.contexts(model_dir, num_contexts, context_len)
    surprises = {name: perplexity.surprises(of, pieces, name, in_one_row=True) for name, of in runners.items()}
    measured = {name: perplexity.compared(of_type, surprises[_EXACT]) for name, of_type in surprises.items()}
    print(f"\n{num_contexts} contexts of {context_len} tokens")
    print_table(
        ["8-bit floats", "perplexity", "change, %"],
        [[name, *perplexity.cells(figures)] for name, figures in measured.items()],
    )
    result = {
        "protocol": __doc__,
        "model": model_name,
        "text": texts.NAME,
        "num_contexts": num_contexts,
        "context_len": context_len,
        "num_predicted": surprises[_EXACT].numel(),
        "measured": measured,
    }
    print("written:", write_result("float8", result))
