"""Experts compute what transformers' modules do, and the weights of chosen ones alone are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.model.cpu import feed_forward, stepwise
from microturn.model.cpu.buffers import Buffers
from microturn.model.cpu.feed_forward import FeedForward
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import DecoderLayer, release_linears
from microturn.model.products import Products
from microturn.model.rotary import Turning
from microturn.model.tracing import trace_layers
from support import models
from support.rounded import rounded

HIDDEN = 48
MODELS = [models.experts, models.shared_expert, models.experts_in_some_layers]


def first_layer(model: PreTrainedModel, products: Products) -> DecoderLayer:
    return DecoderLayer.of(model.model.layers[0], trace_layers(model)[0], Turning(), products)


def fed(layer: DecoderLayer, x: Tensor) -> Tensor:
    buffers = Buffers.of([layer], torch.empty_like(x))
    return stepwise.feed(layer.feed_forward, x, buffers)


def of_transformers(model: PreTrainedModel, x: Tensor) -> Tensor:
    result: Tensor = model.model.layers[0].mlp(x[None])[0]
    return result


@pytest.mark.parametrize("build", MODELS)
@torch.inference_mode()
def test_experts_compute_what_transformers_modules_do(build: Callable[[], PreTrainedModel]) -> None:
    model, x = build(), torch.randn(60, HIDDEN)
    torch.testing.assert_close(fed(first_layer(model, Linear), x), of_transformers(model, x))
    # An input that is between two integers may become either one.
    error = fed(first_layer(model, Int8Linear), x) - of_transformers(rounded(model), x)
    assert float(error.square().mean().sqrt() / of_transformers(model, x).std()) < 0.01


@pytest.mark.parametrize("products", [Linear, Int8Linear])
@pytest.mark.parametrize("build", MODELS)
@torch.inference_mode()
def test_a_row_has_the_same_result_in_any_company(build: Callable[[], PreTrainedModel], products: Products) -> None:
    layer, x = first_layer(build(), products), torch.randn(60, HIDDEN)
    alone = torch.cat([fed(layer, row[None]) for row in x])
    assert torch.equal(fed(layer, x), alone)
    order = torch.randperm(len(x))
    assert torch.equal(fed(layer, x[order[:37]]), alone[order[:37]])


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads for a test."""
    num_threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("products", [Linear, Int8Linear])
@pytest.mark.parametrize(
    ("activation", "width"),
    [("gelu", 1000), ("gelu", 21504), ("quick_gelu", 1000), ("gelu_pytorch_tanh", 21504), ("silu", 1000)],
)
@torch.inference_mode()
def test_an_activation_gives_a_row_the_same_bits_in_any_company(
    activation: str, width: int, products: Products, set_num_threads: Callable[[int], None]
) -> None:
    """Torch's depend on a tensor's strides, and cut a wide row among the threads."""
    model = models.with_served_heads("llama", hidden_act=activation, intermediate_size=width)
    layer, x = first_layer(model, products), torch.randn(9, model.config.hidden_size)
    alone = torch.cat([fed(layer, row[None]).clone() for row in x])
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        assert torch.equal(fed(layer, x), alone)
        assert torch.equal(fed(layer, x[4:5]), alone[4:5])
    if products is Linear:
        torch.testing.assert_close(alone, of_transformers(model, x), atol=1e-4, rtol=1e-4)


class _Counted(Linear):
    """Records how many rows each product has had."""

    rows_of: list[tuple[int, int]]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        self.rows_of.append((id(self), len(x)))
        return super().__call__(x, out)


@torch.inference_mode()
def test_a_chosen_expert_is_read_once_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of: list[tuple[int, int]] = []
    monkeypatch.setattr(_Counted, "rows_of", rows_of, raising=False)
    model = models.experts()
    layer = replace(first_layer(model, Linear), feed_forward=FeedForward.of(model.model.layers[0].mlp, _Counted))
    fed(layer, torch.randn(1, HIDDEN))
    assert [count for _, count in rows_of] == [1] * 4, "two products of each of two experts"
    rows_of.clear()
    fed(layer, torch.randn(200, HIDDEN))
    assert len({product for product, _ in rows_of}) == len(rows_of) == 10
    assert sum(count for _, count in rows_of) == 200 * 2 * 2


def test_a_token_reads_the_weights_of_its_experts() -> None:
    part = first_layer(models.experts(), Linear).feed_forward
    assert len(part.blocks) == 5
    assert part.weight_bytes == 4 * HIDDEN * (2 * 3 * 80 + 5), "two experts, and a router of 5 rows"
    part = first_layer(models.shared_expert(), Linear).feed_forward
    assert part.weight_bytes == 4 * HIDDEN * (3 * 3 * 32 + 3 * 64 + 9)
    part = first_layer(models.llama(), Linear).feed_forward
    assert part.weight_bytes == 4 * HIDDEN * 3 * 80


def test_experts_in_float32_share_the_model_s_weights_and_are_freed() -> None:
    model = models.shared_expert()
    module = model.model.layers[0].mlp
    part = FeedForward.of(module, Linear)
    assert part.blocks[2].gate_up.weights[0].ctypes.data == module.experts.gate_up_proj[2].data_ptr()
    release_linears(model)
    assert {module.experts.gate_up_proj.device.type, module.experts.down_proj.device.type} == {"meta"}


def _more_than_a_weight(router: nn.Module) -> None:
    router.bias = nn.Parameter(torch.zeros(5))


def _a_correction(router: nn.Module) -> None:
    router.e_score_correction_bias = nn.Buffer(torch.zeros(5))


@pytest.mark.parametrize("change", [_more_than_a_weight, _a_correction])
def test_another_router_is_not_known(change: Callable[[nn.Module], None]) -> None:
    module = models.experts().model.layers[0].mlp
    assert not list(feed_forward.unlike(module))
    change(module.gate)
    assert next(feed_forward.unlike(module))


def test_experts_with_biases_and_another_shared_expert_are_not_known() -> None:
    module = models.experts().model.layers[0].mlp
    module.experts.gate_up_proj_bias = nn.Parameter(torch.zeros(5, 160))
    assert next(feed_forward.unlike(module))
    module = models.shared_expert().model.layers[0].mlp
    module.shared_expert_gate = nn.Linear(HIDDEN, 1)
    assert next(feed_forward.unlike(module))
