"""Transformers' own multimodal model: the reference of sessions that are told images and sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM


class WholeModel:
    """The model of a checkpoint, and what a session with it has been told and has said."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._inputs: dict[str, Tensor] = {}

    @property
    def context(self) -> list[int]:
        """All token ids, placeholders included."""
        return self._inputs["input_ids"][0].tolist()

    def hear(self, inputs: Mapping[str, Tensor]) -> None:
        """Adds text with media behind all before."""
        for name, value in inputs.items():
            # Tokens follow each other, and so do tiles [1, n, …]; other media are a batch.
            dim = 1 if name in ("input_ids", "attention_mask") or value.ndim == 5 or "pixel_att" in name else 0
            self._inputs[name] = torch.cat([self._inputs[name], value], dim) if name in self._inputs else value

    def say(self, ids: list[int]) -> None:
        """Adds tokens."""
        said = torch.tensor([ids])
        for name, value in (("input_ids", said), ("attention_mask", torch.ones_like(said))):
            self._inputs[name] = torch.cat([self._inputs[name], value], 1)

    @torch.inference_mode()
    def generate(self, num_tokens: int) -> list[int]:
        """The tokens that follow, greedily; no end token stops them."""
        self._model.generation_config.eos_token_id = None
        output = self._model.generate(**self._inputs, max_new_tokens=num_tokens, do_sample=False)
        return output[0, len(self.context) :].tolist()

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Logits [n, vocab_size] of one pass over all."""
        return self._model(**self._inputs, use_cache=False).logits[0]
