"""What somebody without a server would write: a stock transformers model in this process, and a cache per conversation.

Nothing of ours is in it. One thread computes; turns of several conversations follow one another, each whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from load_tests.bench.talks import require_len


@contextmanager
def plain_loop(model_dir: Path) -> Iterator[PlainLoop]:
    """Loads a model in float32 for the duration of the block."""
    with ThreadPoolExecutor(1, "plain-loop") as thread:
        yield PlainLoop(thread.submit(_load, model_dir).result(), thread)


class PlainLoop:
    """A model and the thread that computes.

    Args:
        model: stock.
        thread: of one worker.
    """

    def __init__(self, model: PreTrainedModel, thread: ThreadPoolExecutor) -> None:
        self._model = model
        self._thread = thread

    def open(self) -> PlainTalk:
        """See `Service.open`."""
        return PlainTalk(self._model, self._thread)


class PlainTalk:
    """A conversation with a cache of its own (see `Talk`)."""

    def __init__(self, model: PreTrainedModel, thread: ThreadPoolExecutor) -> None:
        self._model = model
        self._thread = thread
        self._cache = DynamicCache(config=model.config)
        # The last token that was said is not in the cache before the next forward pass.
        self._pending: list[int] = []

    async def turn(self, given: Sequence[int], num_output: int) -> None:
        """See `Talk.turn`."""
        loop = asyncio.get_running_loop()
        require_len(await loop.run_in_executor(self._thread, self._generate, given, num_output), num_output)

    async def skip(self, tokens: Sequence[int]) -> None:
        """See `Talk.skip`: one forward pass over all of them."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._append, tokens)

    async def close(self) -> None:
        """See `Talk.close`."""

    @torch.inference_mode()
    def _generate(self, given: Sequence[int], num_output: int) -> list[int]:
        self._pending += given
        generated: list[int] = []
        while len(generated) < num_output:
            self._pending = [self._forward(self._pending)]
            generated += self._pending
        return generated

    @torch.inference_mode()
    def _append(self, tokens: Sequence[int]) -> None:
        *computed, last = [*self._pending, *tokens]
        self._forward(computed)
        self._pending = [last]

    def _forward(self, ids: Sequence[int]) -> int:
        """The likeliest token behind some that are appended."""
        logits = self._model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


def _load(model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    return model.eval()
