"""Embeddings of a token sequence are as good as its ids."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from microturn.turn import EmbedInput
from support.driver import Driver, model_runner
from support.models import VOCAB_SIZE


def test_embeddings_give_the_tokens_of_their_ids(tiny_model: PreTrainedModel) -> None:
    _check(tiny_model, [(5 * at) % VOCAB_SIZE for at in range(50)])


def test_embeddings_give_the_tokens_of_their_ids_in_smollm2(smollm2: PreTrainedModel) -> None:
    _check(smollm2, list(range(1000, 1050)))


def test_embeddings_survive_the_loss_of_their_pages(tiny_model: PreTrainedModel) -> None:
    """What came as embeddings is kept as embeddings, so that it too can be computed again."""
    embed = tiny_model.get_input_embeddings()
    ids = [(11 * at) % VOCAB_SIZE for at in range(60)]
    driver = Driver(model_runner(tiny_model, num_pages=8), num_pages=8, max_context=128)
    driver.turn("kept", EmbedInput(embed(torch.tensor(ids)).detach()), start=True, max_tokens=0)
    driver.turn("other", ids * 2, start=True, max_tokens=0)
    assert driver.engine._sessions.find("kept").table.kv_len == 0, "the pool had room for both"
    after_loss = driver.turn("kept", ids[:5], max_tokens=8)
    expected = driver.turn("fresh", ids + ids[:5], start=True, max_tokens=8)
    assert after_loss.token_ids == expected.token_ids


def _check(model: PreTrainedModel, ids: list[int]) -> None:
    embed = model.get_input_embeddings()

    def embeds(part: list[int]) -> EmbedInput:
        return EmbedInput(embed(torch.tensor(part)).detach())

    driver = Driver(model_runner(model), max_batch_tokens=16)
    driver.turn("ids", ids[:20], start=True, max_tokens=3)
    by_ids = driver.turn("ids", ids[20:], max_tokens=8)
    # In company with one another: embeddings and ids of two sessions share a forward pass.
    driver.turn("embeds", embeds(ids[:20]), start=True, max_tokens=3)
    by_embeds, _ = driver.post("embeds", embeds(ids[20:]), max_tokens=8)
    driver.post("company", ids[:30], start=True, max_tokens=8)
    driver.run()
    assert by_embeds.token_ids == by_ids.token_ids
    assert by_embeds.status.usage == by_ids.status.usage
