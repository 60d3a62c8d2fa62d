"""Runs a batch through the model.

The layers see one packed sequence with explicit positions; our attention reads each row's pages, so that no past token
is recomputed or copied. The layers are ours too for known architectures (`FusedLayers`), else transformers' own, over
``[1, T]``.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from microturn.errors import InvalidArgument, reason_of
from microturn.kv.tensors import KVTensors
from microturn.kv.transfer import upload
from microturn.model import latent_attention, recurrent, rotary, rotary_fit, stock
from microturn.model import paged_attention as paged
from microturn.model.batch import Batch
from microturn.model.paged_attention import PagedAttention
from microturn.model.step_attention import Attention
from microturn.model.traits import Traits


class Runner(Protocol):
    """The model as the engine uses it.

    Attributes:
        vocab_size: ids are below this.
        hidden_size: width of an embedding.
        accepts_embeds: whether embeddings may replace tokens.
        no_window_reason: why rows must not have evicted tokens; None if they may.
        is_asynchronous: whether `run` returns before its work is done, so that the next step can be enqueued meanwhile.
        kv: its KV cache.
    """

    is_asynchronous: bool
    vocab_size: int
    hidden_size: int
    accepts_embeds: bool
    no_window_reason: str | None
    kv: KVTensors

    def run(self, batch: Batch) -> Tensor:
        """Computes the new tokens of all rows and writes their keys and values into the pages.

        Returns:
            float32 logits [sum of the rows' `num_logits`, vocab_size] on the model's device, in the order of rows and
            tokens, valid until the next pass.
        """
        ...


class TransformerLayers(Protocol):
    """A model's layers (see `FusedLayers`).

    Attributes:
        is_compiled: whether all layers are one call where the attention is native.
        weight_bytes: bytes of weights that one pass reads at least.
    """

    @property
    def is_compiled(self) -> bool: ...

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor: ...


class ModelRunner:
    """A Hugging Face causal LM over KV pages, on their device and in the type of its weights.

    Args:
        model: loaded for inference with our attention (see `load_model`).
        kv: the pages; their layout says which kernel computes the attention (see `PagedAttention`).
        decoder: our implementation of the layers; None runs transformers' own.
        accepts_embeds: result of the probe (see `Runner`); `no_window_reason` likewise.
    """

    is_asynchronous = False
    other_weight_bytes = 0  # in other processes, which compute for it

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVTensors,
        *,
        decoder: TransformerLayers | None = None,
        accepts_embeds: bool = True,
        no_window_reason: str | None = None,
    ) -> None:
        self.model = model
        self.decoder = decoder
        self._rotary = rotary.installed(model)
        self._recurrent = recurrent.installed(model)
        self.kv = kv
        self.accepts_embeds = accepts_embeds
        self.no_window_reason = no_window_reason
        self._embeddings = embeddings = model.get_input_embeddings()
        # Embedding rows may be padded beyond the tokenizer's vocabulary; the width of the head counts.
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(embeddings.weight.shape[1])

    def close(self) -> None:
        """Ends processes that compute for it."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """See `Runner.run`."""
        positions, wanted = upload(positions_of(batch), self.kv.device), upload(wanted_of(batch), self.kv.device)
        if self._recurrent is None or self.kv.states is None:
            return self._pass(batch, positions, wanted)
        with self._recurrent.carrying(batch, self.kv.states, self.kv.page_size):
            return self._pass(batch, positions, wanted)

    def _pass(self, batch: Batch, positions: Tensor, wanted: Tensor) -> Tensor:
        """Computes the logits, given the new tokens' positions [tokens] and the indices of tokens with logits [n]."""
        attention = self._attend(batch)
        if self.decoder is not None:
            return self.decoder(self._embed(batch), positions, wanted, attention)
        has_embeds = any(row.embeds for row in batch.rows)
        inputs = {"inputs_embeds": self._embed(batch)[None]} if has_embeds else {"input_ids": self._ids(batch)[None]}
        with paged.attending(attention):
            logits: Tensor = self.model(
                **inputs, position_ids=positions[None], use_cache=False, logits_to_keep=wanted
            ).logits
        return logits[0].float()

    def _attend(self, batch: Batch) -> Attention:
        """The attention of a step."""
        return PagedAttention(batch, self.kv, rotary=self._rotary)

    def _ids(self, batch: Batch) -> Tensor:
        """The new tokens, int64 [tokens]."""
        num_unknown = 0 if batch.ids is None else len(batch.ids)
        known = [*chain.from_iterable(row.token_ids for row in batch.rows[num_unknown:])]
        if batch.ids is None:
            return upload(torch.tensor(known), self.kv.device)
        return torch.cat((batch.ids, upload(torch.tensor(known), self.kv.device))) if known else batch.ids

    def _embed(self, batch: Batch) -> Tensor:
        """The new tokens' embeddings [tokens, hidden], including embeddings given in place of tokens."""
        embeds: Tensor = self._embeddings(self._ids(batch))
        start = 0
        for row in batch.rows:
            for span in row.embeds:
                first = start + span.start
                embeds[first : first + len(span.embeds)] = upload(span.embeds, self.kv.device)
            start += len(row.token_ids)
        return embeds


def positions_of(batch: Batch) -> Tensor:
    """The new tokens' absolute positions, int64 [tokens]."""
    firsts = batch.lengths.cumsum() - batch.lengths
    behind = np.array([row.position for row in batch.rows], np.int64) - firsts
    return torch.from_numpy(np.arange(batch.num_tokens) + behind.repeat(batch.lengths))


def wanted_of(batch: Batch) -> Tensor:
    """Indices of the tokens whose logits are wanted, int64 [n]."""
    nums_wanted = np.array([row.num_logits for row in batch.rows], np.int64)
    behind = batch.lengths.cumsum() - nums_wanted.cumsum()
    return torch.from_numpy(np.arange(nums_wanted.sum()) + behind.repeat(nums_wanted))


def load_model(
    model_dir: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Loads a causal LM with our attention; on a CPU its weights may be mapped from the file.

    Raises:
        InvalidArgument: transformers cannot load a causal LM from the directory, or it lacks weights.
    """
    return prepare_model(read_model(model_dir, dtype), device)


def read_model(model_dir: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads a causal LM as transformers does.

    Raises:
        InvalidArgument: see `load_model`.
    """
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            attn_implementation=stock.IMPLEMENTATION,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers may raise anything
        raise InvalidArgument(f"cannot load a causal language model from '{model_dir}': {reason_of(error)}") from error
    model, report = loaded
    # transformers makes them up, with a warning.
    if missing := sorted(report["missing_keys"]):
        some = ", ".join(missing[:3])
        raise InvalidArgument(f"the model directory '{model_dir}' lacks {len(missing)} of its weights: {some}")
    return model


def prepare_model(model: PreTrainedModel, device: torch.device | str, traits: Traits | None = None) -> PreTrainedModel:
    """Prepares a model for inference: on its device, with our attention, and in float32 with exact rotary angles.

    In a narrower type rounding hides how its layers rotate: see `rotary_fit.adopt`.

    Args:
        model: as transformers loads it.
        device: where it will compute.
        traits: its traits in float32, where they are known: no pass looks for them, and nobody need trace its layers.
    """
    paged.register()
    if model.device != torch.device(device):
        model.to(device)
    if model.device.type == "cpu":
        model.set_experts_implementation("eager")  # one after another: only those that are chosen are read
    recurrent.install(model.eval())
    latent_attention.install(model)
    model.set_attn_implementation(paged.IMPLEMENTATION)
    if traits is not None:
        traits.install(model)
    elif model.dtype == torch.float32:
        rotary_fit.install(model)
    return model


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of forward passes on a CPU made by the calling thread."""
    from microturn.model.cpu import attention as native  # what only a CPU needs: Numba

    torch.set_num_threads(num_threads)
    if native.unavailable_reason() is None:
        native.set_num_threads(num_threads)
