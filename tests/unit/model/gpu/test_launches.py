"""How many kernels a layer takes on a GPU: what Inductor generates for it, our own, FlashInfer's, and the products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from microturn.kv.layer_groups import LayerGroups
from microturn.kv.layer_pages import LayerPages
from microturn.kv.tensors import KVTensors
from microturn.model.gpu import glue, layers, projection_kernel
from microturn.model.gpu.flashinfer_attention import AttentionShape, FlashInferAttention, new_workspace
from microturn.model.gpu.layers import TorchLayers
from microturn.model.tracing import trace
from support import models
from support.gpu_launches import GPU, Launches, on_gpu

# torch's own compiler uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# As wide as an 8B model where width matters: a long sum may want several kernels.
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 4096,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 64,
}
A_LAYER = Counter(
    {
        "aten::mm": 4,
        "triton: _append_projection": 1,
        "flashinfer: attention": 1,
        "flashinfer: merge": 1,
        "inductor": 3,
    }
)


def llama() -> PreTrainedModel:
    return models.build(LlamaForCausalLM, LlamaConfig(**SHAPE))


def head_norms() -> PreTrainedModel:
    return models.build(Qwen3ForCausalLM, Qwen3Config(**SHAPE))


def norms_behind_and_windows() -> PreTrainedModel:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    return models.build(Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE, sliding_window=40, layer_types=types))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with Launches.installed(monkeypatch) as installed:
        yield installed


class Gpu:
    """A model in bfloat16 on a GPU that need not be there, with its layers compiled."""

    def __init__(self, model: PreTrainedModel, launches: Launches) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        self._shapes, scores = trace(model)
        self._attention = AttentionShape.of(model, self._shapes, scores, model.dtype)
        self._mode = FakeTensorMode()
        self._decoder = on_gpu(TorchLayers.of(model, self._shapes), self._mode)
        self._launches = launches

    def launched_by_a_layer(self, *nums_tokens: int) -> Counter[str]:
        """What the last layer adds to the others in the last of some steps of these sizes."""
        num_layers, names = len(self._shapes), self._launches.names
        glue = self._launches.glue()
        for num_tokens in nums_tokens:
            counts = []
            for n in (num_layers, num_layers - 1):
                names.clear()
                self._run(self._decoder.first(n, glue), num_tokens)
                counts.append(Counter(name.split(": triton_")[0] for name in names))
        return counts[0] - counts[1]

    def _run(self, decoder: TorchLayers, num_tokens: int) -> None:
        shapes, dtype = self._shapes, self._attention.dtype
        with self._mode, torch.inference_mode():
            kv = KVTensors(shapes, 2, 16, dtype, GPU, groups=LayerGroups.of(shapes))
            workspace = new_workspace(self._attention, GPU)
            attention = FlashInferAttention(self._attention, kv, workspace, num_tokens, num_tokens, num_tokens)
            hidden = torch.empty(num_tokens, SHAPE["hidden_size"], dtype=dtype, device=GPU)
            positions = torch.empty(num_tokens, dtype=torch.int64, device=GPU)
            with self._launches:
                decoder(hidden, positions, positions[:1], attention)


@pytest.mark.parametrize("build", [llama, head_norms, norms_behind_and_windows])
def test_a_layer_is_ten_kernels(build: Callable[[], PreTrainedModel], launches: Launches) -> None:
    """Compiled for one token, for some, for many, and at last for any number: as the second and later sizes are."""
    assert A_LAYER.total() == 10
    gpu = Gpu(build(), launches)
    for nums_tokens in ((1,), (8,), (256,), (7, 300)):
        assert gpu.launched_by_a_layer(*nums_tokens) == A_LAYER


def test_a_pass_that_does_not_fuse_is_found(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = glue.gate

    def gate(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        gated = plain(gate_up, activation)
        return gated - gated.mean(0)  # over tokens, where all else goes along the width

    monkeypatch.setattr(glue, "gate", gate)
    launched = Gpu(llama(), launches).launched_by_a_layer(256)
    assert (launched - A_LAYER).keys() == {"inductor"}


def test_an_operation_between_the_kernels_is_found(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layers._multiply
    monkeypatch.setattr(layers, "_multiply", lambda product, x: plain(product, x).mul_(1))
    launched = Gpu(llama(), launches).launched_by_a_layer(8)
    assert launched - A_LAYER == {"aten::mul_": 4}


def test_a_projection_that_our_kernel_leaves_to_others_is_found(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are then written by operations of torch, which are left out here."""
    monkeypatch.setattr(projection_kernel, "covers", lambda *_: False)
    monkeypatch.setattr(LayerPages, "put", lambda *_: None)
    launched = Gpu(llama(), launches).launched_by_a_layer(8)
    assert launched == A_LAYER - Counter(["triton: _append_projection"]) + Counter(["inductor"] * 2)
