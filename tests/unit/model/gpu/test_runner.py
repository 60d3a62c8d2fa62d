"""Passes on the GPU's path, without one: eager and captured, with attention of torch and of (plain) FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from microturn.model.batch import Batch, EmbedSpan, Row, RowPages
from microturn.model.gpu.graphs import StepSize
from support import models, plain_flashinfer, recorded_graphs
from support.gpu_runner import gpu_runner
from support.oracle import stock_logits
from support.recorded_graphs import RecordedGraph

SIZES = [StepSize(4, 4, 4), StepSize(8, 2, 7), StepSize(24, 4, 4), StepSize(24, 4, 24)]


@pytest.fixture(params=["llama", "qwen3", "olmo2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """In bfloat16, with heads that FlashInfer serves; our kernel does not cover the norms of the last."""
    return models.with_served_heads(request.param).to(torch.bfloat16)


@pytest.fixture
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)


@pytest.mark.parametrize("build", models.FAST)
def test_logits_in_float32_are_the_stock_model_s(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    ids = torch.randint(models.VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = stock_logits(model, ids)
    runner = gpu_runner(model)
    assert runner.decoder is not None
    for first, last in pairwise([0, 1, 5, 40, len(ids)]):
        num_pages = -(-last // 16)
        others = [RowPages(range(100, 100 + num_pages * kind.num_groups)) for kind in runner.kv.groups.kinds[1:]]
        got = runner.run(Batch([Row(ids[first:last], first, range(num_pages), others=others)]))
        torch.testing.assert_close(got[0], expected[last - 1], atol=1e-4, rtol=1e-4)
    assert torch.equal(stock_logits(model, ids), expected), "the stock model computes as before"


def test_an_unknown_architecture_runs_on_transformers_layers_and_is_not_captured() -> None:
    model = models.layer_norms()
    runner = gpu_runner(model)
    assert runner.decoder is None
    runner.capture(SIZES, max_context=64)
    got = runner.run(Batch([Row([5, 6, 7], 0, [0])]))
    torch.testing.assert_close(got[0], stock_logits(model, [5, 6, 7])[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_without_a_gpu")
def test_captured_passes_give_what_eager_ones_give(model: PreTrainedModel) -> None:
    eager, captured = gpu_runner(model, has_flashinfer=True), gpu_runner(model, has_flashinfer=True)
    for runner in (eager, captured):
        for layer in runner.kv.layers:
            layer.elements.zero_()
    captured.capture(SIZES, max_context=128)
    embeds = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    steps = [
        [Row(list(range(20, 41)), 0, [3, 7])],  # 21 tokens of one
        [Row([5], 21, [3, 7]), Row([6, 7], 0, [4])],  # two rows, three tokens
        [Row([8], 22, [3, 7]), Row([9], 2, [4]), Row([10], 0, [9])],  # decode steps
        [Row([11], 23, [3, 7]), Row([12], 3, [4], wants_logits=False), Row([13], 1, [9])],
        [Row([0, 0, 0, 14], 24, [3, 7], embeds=[EmbedSpan(0, embeds)]), Row([15], 4, [4])],
        [Row(list(range(50, 80)), 0, [11, 12])],  # more than was captured
        [Row([16], 28, [3, 7])],
    ]
    for rows in steps:
        got, expected = captured.run(Batch(rows)).clone(), eager.run(Batch(rows))
        assert got.shape == (sum(row.wants_logits for row in rows), 512)
        torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)
    assert RecordedGraph.num_replays == len(steps) - 1
    for layer, of in zip(captured.kv.layers, eager.kv.layers, strict=True):
        torch.testing.assert_close(layer.elements[:-1], of.elements[:-1], atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("_without_a_gpu")
def test_passes_of_all_sizes_write_their_logits_to_the_same_memory() -> None:
    """70 sizes of 256 sessions would keep gigabytes otherwise."""
    runner = gpu_runner(models.with_served_heads("llama").to(torch.bfloat16), has_flashinfer=True)
    runner.capture(SIZES, max_context=128)
    steps = [[Row([5] * size.num_tokens, 0, [3, 7])] for size in SIZES]
    assert len({runner.run(Batch(rows)).data_ptr() for rows in steps}) == 1
    assert RecordedGraph.num_replays == len(SIZES)


@pytest.mark.usefixtures("_without_a_gpu")
def test_a_step_with_moved_sinks_is_not_replayed(model: PreTrainedModel) -> None:
    runner = gpu_runner(model, has_flashinfer=True)
    runner.capture(SIZES, max_context=128)
    runner.run(Batch([Row(list(range(16)), 0, [0])]))
    num_replays = RecordedGraph.num_replays
    moved = Row([5, 6], 16 + 4096, [0, 1], num_sinks=16, num_evicted=4096)
    near = runner.run(Batch([Row([5, 6], 16, [0, 1])])).clone()
    assert RecordedGraph.num_replays == num_replays + 1
    far = runner.run(Batch([moved]))
    assert RecordedGraph.num_replays == num_replays + 1
    torch.testing.assert_close(far, near, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("_without_a_gpu")
def test_layers_with_a_window_of_their_own_hide_sinks_that_have_moved_as_torch_does() -> None:
    """Of two kinds, which see the sinks of the session's window; the fourth page of the others is where theirs ends."""
    model = models.with_served_heads("gemma3").to(torch.bfloat16)
    runners = [gpu_runner(model, has_flashinfer=has_flashinfer) for has_flashinfer in (True, False)]
    results = []
    for runner in runners:
        runner.run(Batch([Row(list(range(50)), 0, range(4), others=[RowPages(range(10, 14))])]))
        moved = {"num_sinks": 16, "num_evicted": 4096}
        far = Row([5, 6], 50 + 4096, range(4), others=[RowPages(range(10, 14), **moved)], **moved)
        results.append(runner.run(Batch([far])))
    torch.testing.assert_close(results[0], results[1], atol=0.05, rtol=0.05)


def test_tokens_may_lie_on_the_device_alone() -> None:
    model = models.llama()
    ids = torch.tensor([5, 6, 7])
    runner = gpu_runner(model)
    got = runner.run(Batch([Row([0, 0], 0, [0]), Row([0], 0, [1])], ids=ids))
    torch.testing.assert_close(got[0], stock_logits(model, [5, 6])[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], stock_logits(model, [7])[-1], atol=1e-4, rtol=1e-4)
