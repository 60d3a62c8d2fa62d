"""Embeddings of a token sequence are as good as its ids."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from microturn.sessions.inputs import EmbedInput
from support.driver import Driver, model_runner
from support.models import VOCAB_SIZE


def test_embeddings_give_the_tokens_of_their_ids(tiny_model: PreTrainedModel) -> None:
    _check(tiny_model, [(5 * at) % VOCAB_SIZE for at in range(50)])


def test_embeddings_give_the_tokens_of_their_ids_with_real_weights(real_model: PreTrainedModel) -> None:
    _check(real_model, list(range(1000, 1050)))


def test_embeddings_survive_the_loss_of_their_pages(tiny_model: PreTrainedModel) -> None:
    """What came as embeddings is kept as embeddings, so that it too can be computed again."""
    ids = [(11 * at) % VOCAB_SIZE for at in range(60)]
    driver = Driver(model_runner(tiny_model, num_pages=8), num_pages=8, max_context=128)
    driver.turn("kept", _embeds(tiny_model, ids), start=True, max_tokens=0)
    driver.turn("other", ids * 2, start=True, max_tokens=0)
    assert driver.engine._sessions.find("kept").table.kv_len == 0, "the pool had room for both"
    after_loss = driver.turn("kept", ids[:5], max_tokens=8)
    expected = driver.turn("fresh", ids + ids[:5], start=True, max_tokens=8)
    assert after_loss.token_ids == expected.token_ids


def _embeds(model: PreTrainedModel, ids: list[int]) -> EmbedInput:
    return EmbedInput(model.get_input_embeddings()(torch.tensor(ids, device=model.device)).detach().cpu())


def _check(model: PreTrainedModel, ids: list[int]) -> None:
    driver = Driver(model_runner(model), max_batch_tokens=16)
    driver.turn("ids", ids[:20], start=True, max_tokens=3)
    by_ids = driver.turn("ids", ids[20:], max_tokens=8)
    # In company with one another: embeddings and ids of two sessions share a forward pass.
    driver.turn("embeds", _embeds(model, ids[:20]), start=True, max_tokens=3)
    by_embeds, _ = driver.post("embeds", _embeds(model, ids[20:]), max_tokens=8)
    driver.post("company", ids[:30], start=True, max_tokens=8)
    driver.run()
    assert by_embeds.token_ids == by_ids.token_ids
    assert by_embeds.status.usage == by_ids.status.usage
