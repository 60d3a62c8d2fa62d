"""Tests of load_tests.bench.talks and plain_loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from load_tests.bench.plain_loop import PlainLoop
from load_tests.bench.talks import HistoryTalk


async def test_a_history_holds_what_was_given_skipped_and_answered() -> None:
    prompts: list[list[int]] = []

    async def complete(prompt: Sequence[int], num_output: int) -> list[int]:
        prompts.append(list(prompt))
        return [100 + len(prompts)] * num_output

    talk = HistoryTalk(complete)
    await talk.turn([1, 2], 2)
    await talk.skip([3, 4])
    await talk.turn([5], 2)
    assert prompts == [[1, 2], [1, 2, 101, 101, 3, 4, 5]]


async def test_an_answer_that_is_too_short_is_not_a_fast_one() -> None:
    async def complete(_prompt: Sequence[int], _num_output: int) -> list[int]:
        return [7]

    with pytest.raises(RuntimeError, match="1 tokens where 2"):
        await HistoryTalk(complete).turn([1], 2)


async def test_the_plain_loop_answers_as_the_whole_conversation_would() -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, initializer_range=0.3, **sizes)).eval()
    with ThreadPoolExecutor(1) as thread:
        talk = PlainLoop(model, thread).open()
        expected = [5, 6, 7]
        await talk.turn([5, 6, 7], 3)
        for _ in range(3):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert talk._pending == expected[-1:]
        await talk.skip([8, 9])
        assert talk._generate([10], 2) == _greedy(model, [*expected, 8, 9, 10], 2)


def _greedy(model: LlamaForCausalLM, ids: list[int], num_output: int) -> list[int]:
    for _ in range(num_output):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-num_output:]
