"""A compiled layer computes what the same layer does kernel by kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from microturn.model.cpu.buffers import Buffers
from microturn.model.cpu.compiled import CompiledLayer
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.linear import Linear, Product
from microturn.model.cpu.stepwise import StepwiseLayer
from microturn.model.cpu.weights import DecoderLayer
from microturn.model.runner import trace_layers
from support import models


def known_layer(shape: str, products: type[Linear] | type[Int8Linear] = Int8Linear) -> DecoderLayer:
    model = getattr(models, shape)()
    return DecoderLayer.of(model.model.layers[1], trace_layers(model)[1], None, products)


@pytest.mark.parametrize("shape", ["llama", "grouped_heads", "sliding_window", "biases"])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 40])
@torch.inference_mode()
def test_both_ways_give_the_same(shape: str, num_tokens: int) -> None:
    layer = known_layer(shape)
    compiled = CompiledLayer.of(layer)
    assert compiled is not None
    hidden = torch.randn(num_tokens, layer.output.num_out)
    turned = np.random.default_rng(0).random((num_tokens, layer.shape.head_dim), np.float32)
    results = []
    for way in (compiled, StepwiseLayer(layer)):
        buffers = Buffers.of(layer, hidden.clone())
        way.project((turned, 1 - turned), buffers)
        projected = [tensor.clone() for tensor in (buffers.q, buffers.k, buffers.v)]
        way.finish(buffers.q, buffers)
        results.append([*projected, buffers.hidden])
    for got, expected in zip(*results, strict=True):
        # A last bit here or there, and then a step of an input that is rounded.
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert not torch.equal(results[0][-1], hidden)


def test_only_8_bit_products_and_known_activations_are_compiled() -> None:
    assert CompiledLayer.of(known_layer("llama", Linear)) is None
    layer = known_layer("llama")
    object.__setattr__(layer, "activation", nn.GELU())
    assert CompiledLayer.of(layer) is None


def test_a_layer_s_products_are_its_large_weights() -> None:
    layer = known_layer("llama")
    products: tuple[Product, ...] = (layer.qkv, layer.output, layer.gate_up, layer.down)
    assert layer.products == products
