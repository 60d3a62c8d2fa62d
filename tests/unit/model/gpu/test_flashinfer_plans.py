"""FlashInfer's own planner on every captured size: what a graph has baked in stays, memory is enough, no key is missed.

The planner is compiled for a CPU and asked through FlashInfer's own wrapper; GPUs are those that it may be told of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.gpu import flashinfer_kernel
from microturn.model.gpu.flashinfer_attention import AttentionShape, FlashInferAttention, new_workspace
from microturn.model.gpu.graphs import StepSize, padding_batch, step_sizes
from support import recorded_graphs
from support.flashinfer_planner import Gpu, PlanError, Planned, Planner
from support.planned_blocks import assert_covered_once

MAX_ROWS, MAX_CONTEXT, PAGE_SIZE = 256, 32 << 10, 16

A100 = Gpu(108, (8, 0), 163 << 10)
H100 = Gpu(132, (9, 0), 227 << 10)
B200 = Gpu(148, (10, 0), 227 << 10)
LARGEST = Gpu(192, (12, 0), 99 << 10)  # the most processors that sizes are reckoned for

# Lengths and contexts of some rows, which a step repeats, and the share of a size that it fills.
Recipe = tuple[list[tuple[int, int]], float]
RECIPES: st.SearchStrategy[Recipe] = st.tuples(
    st.lists(
        st.tuples(
            st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 512)),
            st.one_of(st.integers(0, 200), st.integers(0, MAX_CONTEXT - 512)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.05, 0.5, 1.0]),
)


@dataclass(frozen=True)
class Model:
    """The attention of a model, and the GPU that it is on."""

    gpu: Gpu
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    kv_dtype: torch.dtype = torch.bfloat16

    @cached_property
    def layers(self) -> list[LayerShape]:
        return [LayerShape(self.num_kv_heads, self.head_dim, window) for window in self.windows]

    @cached_property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.layers, [None] * len(self.layers), self.num_heads, torch.bfloat16, None)

    @cached_property
    def kv(self) -> KVTensors:
        return KVTensors(self.layers, 2, PAGE_SIZE, self.kv_dtype, groups=LayerGroups.of(self.layers))

    @property
    def sizes(self) -> list[StepSize]:
        return step_sizes(MAX_ROWS, 2048, self.shape)

    def batch(self, recipe: Recipe, max_tokens: int, max_rows: int) -> Batch:
        """A step by the recipe that is no larger."""
        given, share = recipe
        rows: list[Row] = []
        room, num_rows = max(1, int(share * max_tokens)), max(1, int(share * max_rows))
        while room and len(rows) < num_rows:
            length, position = given[len(rows) % len(given)]
            rows.append(self._row(min(length, room), position))
            room -= len(rows[-1].token_ids)
        return Batch(rows)

    def _row(self, length: int, position: int) -> Row:
        seen = [self._pages(length, position, kind.window) for kind in self.kv.groups.kinds]
        return Row([0] * length, position, seen[0].pages, others=seen[1:])

    def _pages(self, length: int, position: int, window: int | None) -> RowPages:
        evicted = 0 if window is None else max(0, position - window) // PAGE_SIZE
        return RowPages([0] * (-(-(position + length) // PAGE_SIZE) - evicted), 0, evicted * PAGE_SIZE)


MODELS = {
    "8B on an H100": Model(H100, 32, 8, 128),
    "8B, 8-bit cache, on the largest": Model(LARGEST, 32, 8, 128, kv_dtype=torch.float8_e4m3fn),
    "1B on an A100": Model(A100, 32, 8, 64),
    "windows on an H100": Model(H100, 8, 4, 256, (None, 1024)),
    "groups of seven on a B200": Model(B200, 28, 4, 128),
    "StarCoder's 48 heads on one, on an H100": Model(H100, 48, 1, 128),
    "one key head on an H100": Model(H100, 16, 1, 128, (None, 512)),
}


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner.build(tmp_path_factory.mktemp("planner"))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture
def workspace(model: Model) -> Tensor:
    return new_workspace(model.shape, torch.device("cpu"))  # only its size matters, and nothing is written


Plan = Callable[[FlashInferAttention, Batch], list[Planned]]


@pytest.fixture
def plan(planner: Planner, model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Plans a step: once for each window."""
    recorded_graphs.install(monkeypatch)
    planner.install(monkeypatch, model.gpu)

    def planned(attention: FlashInferAttention, batch: Batch) -> list[Planned]:
        attention.plan(batch)
        taken, planner.plans[:] = planner.plans[:], []
        assert len(taken) == len(model.layers)
        return taken

    return planned


@dataclass(frozen=True)
class Captured:
    """A captured pass: its attention, and the plans that it was captured with."""

    attention: FlashInferAttention
    plans: list[Planned]

    @classmethod
    def of(cls, model: Model, size: StepSize, workspace: Tensor, plan: Plan) -> Captured:
        """As `GpuRunner.capture` does it."""
        max_pages = max(size.num_tokens, size.num_rows * -(-MAX_CONTEXT // PAGE_SIZE))
        attention = FlashInferAttention(model.shape, model.kv, workspace, size.num_tokens, size.num_planned, max_pages)
        return cls(attention, plan(attention, padding_batch(model.kv, size.num_tokens, size.num_rows)))


def captured(model: Model, workspace: Tensor, plan: Plan) -> dict[StepSize, Captured]:
    return {size: Captured.of(model, size, workspace, plan) for size in model.sizes}


def assert_replayable(of: Captured, replayed: list[Planned]) -> None:
    for before, now in zip(of.plans, replayed, strict=True):
        assert now.info == before.info, "a replay has the grid, tile and places of the capture"
        assert_covered_once(now)


def test_each_captured_size_has_the_tile_and_the_room_that_it_was_chosen_for(
    model: Model, workspace: Tensor, plan: Plan
) -> None:
    sizes = captured(model, workspace, plan)
    assert len(sizes) > 50
    for size, of in sizes.items():
        for planned in of.plans:
            info = planned.info
            assert info.tile == size.tile(planned.group_size, planned.head_dim)
            assert info.max_tokens == size.num_tokens
            assert planned.workspace_bytes <= size.partial_bytes(model.shape) <= workspace.nbytes
            assert_covered_once(planned)


def test_replays_of_each_size_keep_its_plan_and_read_each_key_once(model: Model, workspace: Tensor, plan: Plan) -> None:
    sizes = captured(model, workspace, plan)

    @settings(max_examples=10, deadline=None)
    @given(RECIPES)
    def check(recipe: Recipe) -> None:
        for size, of in sizes.items():
            assert_replayable(of, plan(of.attention, model.batch(recipe, size.num_tokens, size.num_rows)))

    check()


def test_any_step_that_is_not_captured_is_planned(model: Model, workspace: Tensor, plan: Plan) -> None:
    attention = FlashInferAttention(model.shape, model.kv, workspace, 2048)

    @settings(max_examples=60, deadline=None)
    @given(RECIPES, st.integers(1, 2048))
    def check(recipe: Recipe, max_tokens: int) -> None:
        for planned in plan(attention, model.batch(recipe, max_tokens, MAX_ROWS)):
            assert planned.workspace_bytes <= workspace.nbytes
            assert_covered_once(planned)

    check()


only_8b = pytest.mark.parametrize("model", ["8B on an H100"], indirect=True)
DECODE: Recipe = ([(1, 1000)], 0.5)


@only_8b
def test_too_little_memory_for_the_tables_of_a_plan_is_found(
    model: Model, workspace: Tensor, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_kernel, "_PLAN_BYTES", 12 << 10)
    with pytest.raises(PlanError, match="Buffer overflow when allocating memory for batch_prefill"):
        captured(model, workspace, plan)


@only_8b
def test_a_workspace_that_lacks_a_few_bytes_is_found(model: Model, workspace: Tensor, plan: Plan) -> None:
    most = max(planned.workspace_bytes for of in captured(model, workspace, plan).values() for planned in of.plans)
    captured(model, workspace[:most], plan)
    with pytest.raises(PlanError, match="Buffer overflow when allocating memory for batch_prefill_tmp_s"):
        captured(model, workspace[: most - 4], plan)


@only_8b
def test_a_size_that_expects_another_tile_is_found(
    model: Model, workspace: Tensor, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSize, "tile", lambda *_: 64)
    with pytest.raises(AssertionError, match="assert 128 == 64"):
        test_each_captured_size_has_the_tile_and_the_room_that_it_was_chosen_for(model, workspace, plan)


@only_8b
def test_plans_for_the_tokens_of_a_step_in_place_of_those_of_its_size_are_found(
    model: Model, planner: Planner, workspace: Tensor, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have other tiles, of which a captured pass knows nothing."""
    as_it_is = planner.plan

    def for_step(*arguments: Any) -> Any:
        before, query_indptr = arguments[:4], arguments[4]
        return as_it_is(*before, *arguments[4:7], int(query_indptr[-1]), *arguments[8:])

    monkeypatch.setattr(planner, "plan", for_step)
    of = Captured.of(model, StepSize(64, 4, 4), workspace, plan)
    with pytest.raises(AssertionError, match="a replay has the grid, tile and places of the capture"):
        assert_replayable(of, plan(of.attention, model.batch(DECODE, 64, 4)))


@only_8b
@pytest.mark.parametrize(
    ("table", "bit", "message"),
    [
        ("rows_at", 1, "each tile of queries meets each chunk of keys once"),
        ("query_tiles_at", 1, "each tile of queries meets each chunk of keys once"),
        ("chunks_at", 1, "each tile of queries meets each chunk of keys once"),
        ("is_valid_at", 1, "each tile of queries meets each chunk of keys once"),
        ("chunk_size_at", 64, "each tile of queries meets each chunk of keys once"),
        ("merge_indptr_at", 1, "all results of a token are merged"),
        ("out_indptr_at", 1, "results are merged where they were written"),
    ],
)
def test_a_wrong_number_in_a_plan_is_found(
    table: str, bit: int, message: str, model: Model, workspace: Tensor, plan: Plan
) -> None:
    of = Captured.of(model, StepSize(8, 8, 8), workspace, plan)
    (planned,) = plan(of.attention, model.batch(DECODE, 8, 8))
    assert_covered_once(planned)
    memory = planned.memory.copy()
    memory[getattr(planned.info, table)] ^= bit
    with pytest.raises(AssertionError, match=message):
        assert_covered_once(replace(planned, memory=memory))
