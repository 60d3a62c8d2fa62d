"""The work of a step on the meta device, which has shapes and no values: whatever would read one of a GPU fails here.

So does whatever mixes what lies on the host with what lies on the device. And no number of tokens has torch compile
what lies between products and attention anew: on a GPU that would hold up all sessions for seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as compiler
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from microturn.model.batch import Batch, EmbedSpan, Row, RowPages
from microturn.model.gpu.glue import Glue
from microturn.model.gpu.runner import GpuRunner
from microturn.model.sampler import choose
from support import models
from support.gpu_runner import gpu_runner
from support.plain_sampler import random_step

META = torch.device("meta")
NUM_PAGES = 20


def runner_without_values(build: Callable[[], PreTrainedModel]) -> GpuRunner:
    runner = gpu_runner(build().to(META))
    assert runner.decoder is not None
    return runner


def row(runner: GpuRunner, num_tokens: int, start: int, **kwargs: object) -> Row:
    """A session's, whose pages overlap those of others: nothing is written."""
    others = [RowPages(range(NUM_PAGES * kind.num_groups)) for kind in runner.kv.groups.kinds[1:]]
    return Row([5] * num_tokens, start, range(NUM_PAGES), others=others, **kwargs)


@pytest.mark.parametrize("build", models.FAST)
def test_a_pass_reads_nothing_from_the_device(build: Callable[[], PreTrainedModel]) -> None:
    runner = runner_without_values(build)
    embeds = EmbedSpan(1, torch.empty(2, runner.hidden_size))
    rows = [row(runner, 1, 40), row(runner, 4, 30, num_drafts=2), row(runner, 5, 0, embeds=[embeds])]
    chosen_before = torch.empty(1, dtype=torch.int64, device=META)
    logits = runner.run(Batch([*rows, row(runner, 3, 7, wants_logits=False)], chosen_before))
    assert (logits.shape, logits.device) == ((1 + 3 + 1, models.VOCAB_SIZE), META)


def test_one_that_reads_a_value_is_found() -> None:
    runner = runner_without_values(models.llama)
    assert runner.decoder is not None

    def gate_unless_empty(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return Glue().gate(gate_up, activation) if gate_up.any() else gate_up

    runner.decoder.glue = replace(Glue(), gate=gate_unless_empty)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        runner.run(Batch([row(runner, 1, 40)]))


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_reads_nothing_from_the_device(seed: int) -> None:
    logits, rows = random_step(random.Random(seed), num_rows=30, vocab_size=97)
    rows = [given if given.unknown is None else given._replace(unknown=given.unknown.to(META)) for given in rows]
    ids = choose(logits.to(META), rows, at_once=16)
    assert (ids.shape, ids.device) == ((30,), META)


@pytest.mark.parametrize("build", models.FAST)
def test_after_three_numbers_of_tokens_none_compiles_anything(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compiled is decided before the compiler's back end, and that needs a GPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    runner = runner_without_values(build)
    assert runner.decoder is not None
    runner.decoder.glue = Glue.compiled()

    def num_compiled(*nums_tokens: int) -> int:
        before = counters["stats"]["unique_graphs"]
        for num_tokens in nums_tokens:
            runner.run(Batch([row(runner, num_tokens, 0)]))
        return counters["stats"]["unique_graphs"] - before

    with compiler.patch(fail_on_recompile_limit_hit=True):
        assert 0 < num_compiled(7, 1, 3) <= 15
        assert num_compiled(2, 4, 16, 33, 64, 128, 300) == 0
