"""What FlashInfer is handed: with functions that do what it documents, attention is that of `PagedAttention`."""

from __future__ import annotations

from collections.abc import Sequence

import flashinfer
import pytest
import torch
from torch import Tensor

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.gpu import flashinfer_attention, projection_kernel
from microturn.model.gpu.flashinfer_attention import AttentionShape, FlashInferAttention
from microturn.model.gpu.glue import Projection, split_heads
from microturn.model.gpu.projection_kernel import append_projection
from microturn.model.paged_attention import PagedAttention
from microturn.model.rotary import Rotary, Turning
from microturn.model.scores import Scores
from support import plain_flashinfer, projections, recorded_graphs

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
SCALE = 0.2
ROTARY = Rotary({None: 0.1 ** torch.arange(HEAD_DIM // 2).float()}, {None: 1.0}, [Turning()] * 3)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)


@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "merge_state"])
def test_the_plain_functions_are_called_like_flashinfer_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plain, real = getattr(plain_flashinfer, name), getattr(flashinfer, name)
    pairs = [(plain, real)]
    if isinstance(plain, type):
        methods = ("__init__", "plan", "run", "reset_workspace_buffer")
        pairs = [(getattr(plain, method), getattr(real, method)) for method in methods]
    assert [plain_flashinfer.parameters_beyond(*pair) for pair in pairs] == [set()] * len(pairs)


MIXED = [(1, 40), (5, 9), (7, 0), (4, 4), (1, 0), (1, 15)]
DECODE = [(1, 11), (1, 12), (1, 63)]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("room", [None, (0, 0), (3, 0), (0, 5), (2, 9)], ids=lambda room: f"room {room}")
def test_attention_and_pages_are_torch_s(
    rows: list[tuple[int, int]], window: int | None, kv_dtype: torch.dtype, room: tuple[int, int] | None
) -> None:
    """With `room` the step is of a fixed size, with so many rows and tokens more than the batch has."""
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM, window)]
    kv, plain_kv = _pages(layers, kv_dtype), _pages(layers, kv_dtype)
    attention = _attention(layers, kv, rows, room)
    for seed in range(2):  # a second step over the same memory, its pages in another order
        batch = _batch(rows, seed)
        attention.plan(batch)
        q, k, v = _random(batch.num_tokens, seed)
        expected = PagedAttention(batch, plain_kv).append_and_attend(0, q, k, v, Scores(SCALE, window))
        padding = 0 if room is None else sum(room)
        q, k, v = (torch.cat((x, torch.full((padding, *x.shape[1:]), torch.nan, dtype=x.dtype))) for x in (q, k, v))
        got = attention.append_and_attend(0, q, k, v, Scores(SCALE, window))[: batch.num_tokens]
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
        assert _equal_but_for_padding(kv, plain_kv)


@pytest.mark.parametrize("room", [None, (2, 3)])
def test_a_projection_goes_straight_into_the_pages(
    room: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel itself, interpreted; padding is no number."""
    monkeypatch.setattr(projection_kernel, "append_projection", append_projection)
    projections.let_interpreter_round(monkeypatch)
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)]
    kv, plain_kv = _pages(layers, torch.bfloat16), _pages(layers, torch.bfloat16)
    attention = _attention(layers, kv, MIXED, room)
    for rows, seed in ((MIXED, 0), (MIXED, 1), (MIXED if room is None else DECODE, 2)):
        batch = _batch(rows, seed)
        attention.plan(batch)
        num_tokens = batch.num_tokens
        padding = 0 if room is None else sum(num_new for num_new, _ in MIXED) + sum(room) - num_tokens
        qkv = torch.cat(_random(num_tokens, seed), 1)
        qkv = torch.cat((qkv, torch.full((padding, *qkv.shape[1:]), torch.nan, dtype=qkv.dtype)))
        angles = torch.arange(num_tokens + padding)[:, None] * 0.1 ** torch.arange(HEAD_DIM // 2)
        projection = Projection(qkv, None, None, (angles.cos(), angles.sin(), False), NUM_HEADS, NUM_KV_HEADS)
        plain = [x[:num_tokens] for x in split_heads(projection)]
        expected = PagedAttention(batch, plain_kv).append_and_attend(0, *plain, Scores(SCALE))
        queries = attention.append_projection(0, projection)
        assert queries is not None
        got = attention.attend(0, queries, Scores(SCALE))
        torch.testing.assert_close(got[:num_tokens], expected, atol=2e-2, rtol=2e-2)
        for layer, of in zip(kv.layers, plain_kv.layers, strict=True):
            torch.testing.assert_close(layer.elements[:-1], of.elements[:-1])


def test_a_projection_that_the_kernel_does_not_cover_is_not_written() -> None:
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)]
    kv, plain_kv = _pages(layers, torch.bfloat16), _pages(layers, torch.bfloat16)
    attention = _attention(layers, kv, DECODE, None)
    attention.plan(_batch(DECODE, 0))
    qkv, angles = torch.cat(_random(3, 0), 1), torch.ones(3, HEAD_DIM // 2)
    norm = torch.ones(NUM_HEADS * HEAD_DIM), 1e-6
    of_all_heads = Projection(qkv, norm, None, (angles, angles, False), NUM_HEADS, NUM_KV_HEADS)
    assert attention.append_projection(0, of_all_heads) is None
    assert _equal_but_for_padding(kv, plain_kv)


def test_a_step_of_a_fixed_size_may_be_smaller_than_the_one_before() -> None:
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)]
    kv = _pages(layers, torch.bfloat16)
    attention = _attention(layers, kv, MIXED, (1, 1))
    size = sum(n for n, _ in MIXED) + 2
    for rows in (MIXED, DECODE, MIXED[:1]):
        batch = _batch(rows, 0)
        attention.plan(batch)
        q, k, v = _random(size, 1)
        expected_kv = _copy(kv)
        expected = PagedAttention(batch, expected_kv).append_and_attend(
            0, *(x[: batch.num_tokens] for x in (q, k, v)), Scores(SCALE)
        )
        got = attention.append_and_attend(0, q, k, v, Scores(SCALE))
        torch.testing.assert_close(got[: batch.num_tokens], expected, atol=2e-2, rtol=2e-2)
        assert _equal_but_for_padding(kv, expected_kv)


def test_sinks_that_have_moved_are_seen_by_queries_that_are_turned_back() -> None:
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)]
    kv, plain_kv = _pages(layers, torch.bfloat16), _pages(layers, torch.bfloat16)
    pages = list(range(60))
    rows = [
        Row([0] * 3, 1033, pages[:8], num_sinks=2 * PAGE_SIZE, num_evicted=1004),
        Row([0] * 2, 5, pages[8:10]),
        Row([0], 520, pages[10:14], num_sinks=PAGE_SIZE, num_evicted=508),
    ]
    attention = FlashInferAttention(_shape(layers), kv, torch.empty(0), 64)
    for batch in (Batch(rows), Batch(rows[1:2]), Batch(rows[::-1])):
        q, k, v = _random(batch.num_tokens, 5)
        expected = PagedAttention(batch, plain_kv, rotary=ROTARY).append_and_attend(0, q, k, v, Scores(SCALE))
        attention.plan(batch)
        got = attention.append_and_attend(0, q, k, v, Scores(SCALE))
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sink_logits", [False, True])
def test_soft_caps_and_sink_logits_are_those_of_each_layer(has_sink_logits: bool, soft_cap: float | None) -> None:
    """Beside a layer without; some rows have sinks that have moved."""
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)] * 2
    sink_logits = torch.linspace(-3, 3, NUM_HEADS) if has_sink_logits else None
    scores = [Scores(SCALE), Scores(SCALE, None, soft_cap, sink_logits)]
    kv, plain_kv = _pages(layers, torch.bfloat16), _pages(layers, torch.bfloat16)
    rows = [
        Row([0] * 3, 1033, list(range(8)), num_sinks=2 * PAGE_SIZE, num_evicted=1004),
        Row([0] * 2, 5, [8, 9]),
    ]
    shape = AttentionShape(layers, [of.soft_cap for of in scores], NUM_HEADS, torch.bfloat16, ROTARY)
    attention = FlashInferAttention(shape, kv, torch.empty(0), 64)
    for batch in (Batch(rows), Batch(rows[1:])):
        attention.plan(batch)
        expecting = PagedAttention(batch, plain_kv, rotary=ROTARY)
        for layer, of in enumerate(scores):
            q, k, v = _random(batch.num_tokens, layer)
            expected = expecting.append_and_attend(layer, q, k, v, of)
            got = attention.append_and_attend(layer, q, k, v, of)
            torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_each_group_of_layers_has_its_pages_and_each_kind_its_window() -> None:
    """Three layers in three groups: one that sees all, and two that see ten tokens and keep three pages."""
    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM, window) for window in (10, None, 10)]
    kv, plain_kv = _pages(layers, torch.bfloat16), _pages(layers, torch.bfloat16)
    assert kv.groups.num_groups == 3
    others = [RowPages(list(range(30, 36)), 0, 2 * PAGE_SIZE)]
    batch = Batch([Row([0] * 2, 18, [7, 3, 21, 5, 9], others=others)])
    attention = FlashInferAttention(_shape(layers), kv, torch.empty(0), 64)
    attention.plan(batch)
    expecting = PagedAttention(batch, plain_kv)
    for layer, shape in enumerate(layers):
        q, k, v = _random(2, layer)
        expected = expecting.append_and_attend(layer, q, k, v, Scores(SCALE * (layer + 1), shape.window))
        got = attention.append_and_attend(layer, q, k, v, Scores(SCALE * (layer + 1), shape.window))
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert _equal_but_for_padding(kv, plain_kv)


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype", "reason"),
    [
        (LayerShape(2, 80), torch.bfloat16, torch.bfloat16, "heads have 80 elements; FlashInfer serves 64, 128, 256"),
        (LayerShape(2, 64), torch.float32, torch.bfloat16, "queries are torch.float32"),
        (LayerShape(2, 64), torch.bfloat16, torch.int8, "the KV cache is torch.int8"),
    ],
)
def test_what_flashinfer_has_no_kernel_for_is_told(
    shape: LayerShape, dtype: torch.dtype, kv_dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    found = flashinfer_attention.unavailable_reason(gpu, [LayerShape(2, 64), shape], dtype, kv_dtype)
    assert found is not None
    assert reason in found
    served = flashinfer_attention.unavailable_reason(gpu, [LayerShape(2, 64)], torch.bfloat16, torch.bfloat16)
    assert served is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    found = flashinfer_attention.unavailable_reason(gpu, [LayerShape(2, 64)], torch.bfloat16, torch.bfloat16)
    assert found == "Tesla T4 is older than Ampere, the first that FlashInfer serves"


def test_a_cpu_has_no_flashinfer() -> None:
    found = flashinfer_attention.unavailable_reason(CPU, [LayerShape(2, 64)], torch.bfloat16, torch.bfloat16)
    assert found == "FlashInfer runs on a GPU, not on the device 'cpu'"


def _shape(layers: Sequence[LayerShape]) -> AttentionShape:
    return AttentionShape(layers, [None] * len(layers), NUM_HEADS, torch.bfloat16, ROTARY)


def _attention(
    layers: Sequence[LayerShape], kv: KVTensors, rows: list[tuple[int, int]], room: tuple[int, int] | None
) -> FlashInferAttention:
    num_tokens = sum(num_new for num_new, _ in rows)
    if room is None:
        return FlashInferAttention(_shape(layers), kv, torch.empty(0), num_tokens + 3)
    return FlashInferAttention(_shape(layers), kv, torch.empty(0), num_tokens + sum(room), len(rows) + room[0], 100)


def _pages(layers: Sequence[LayerShape], dtype: torch.dtype) -> KVTensors:
    """64 pages and one for padding, always the same."""
    float8 = [LayerScales(0.3, 1.7)] * len(layers) if dtype == torch.float8_e4m3fn else None
    kv = KVTensors(layers, 65, PAGE_SIZE, dtype, groups=LayerGroups.of(layers), float8=float8)
    generator = torch.Generator().manual_seed(0)
    for elements in {id(layer.elements): layer.elements for layer in kv.layers}.values():
        elements.copy_(torch.randn(elements.shape, generator=generator))
    return kv


def _copy(kv: KVTensors) -> KVTensors:
    copied = _pages([LayerShape(NUM_KV_HEADS, HEAD_DIM)], kv.layers[0].elements.dtype)
    copied.layers[0].elements.copy_(kv.layers[0].elements)
    return copied


def _batch(rows: list[tuple[int, int]], seed: int) -> Batch:
    pages = iter(torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist())
    return Batch(
        [
            Row([0] * num_new, position, [next(pages) for _ in range(-(-(position + num_new) // PAGE_SIZE))])
            for num_new, position in rows
        ]
    )


def _random(num_tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator).bfloat16() for n in heads]


def _equal_but_for_padding(kv: KVTensors, expected: KVTensors) -> bool:
    return all(
        torch.equal(layer.elements[:-1].view(torch.uint8), of.elements[:-1].view(torch.uint8))
        for layer, of in zip(kv.layers, expected.layers, strict=True)
    )
