"""Images and sound as embeddings: the encoder and the projector of a multimodal checkpoint, without its language part.

Takes torch and transformers, which the client itself does not need: ``pip install microturn-client[media]``. The
language part of the same checkpoint is on the server: ``microturn serve --model DIR``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import logging

from microturn_client._errors import InvalidArgument

__all__ = ["MediaEncoder"]

# What the server has. Of the weights of these modules none is needed here.
_LANGUAGE_PARTS = ("language_model.", "text_model.", "lm_head.")
# What a language model is handed for its own cache, which is empty, and not for what it sees.
_OF_ITS_CACHE = {"past_key_values", "cache_position"}


class MediaEncoder:
    """Turns what a checkpoint's processor makes of images, sound and text into pieces that a session takes.

    The checkpoint's own code encodes, projects and says which embeddings stand where. Of its weights, those of the
    language part are not loaded.

    Attributes:
        hidden_size: width of an embedding.
    """

    def __init__(
        self, checkpoint: str | PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Loads the encoder and the projector.

        Args:
            checkpoint: a directory or a name, as transformers takes it, of a model with an encoder before its language
                part.
            device: where to compute.
            dtype: of the weights, and of the embeddings.

        Raises:
            InvalidArgument: transformers cannot load it, it lacks weights, or there is no encoder.
        """
        self._model, self.hidden_size = _load(checkpoint, dtype)
        self._model.to(device)

    @torch.no_grad()
    def pieces(self, inputs: Mapping[str, Any]) -> list[list[int] | Tensor]:
        """What to append to a session, in this order.

        Args:
            inputs: what the checkpoint's processor returns for one prompt as tensors of torch: `input_ids` int64
                [1, n], and all that the encoder takes.

        Returns:
            Of the n tokens, each run of text as its ids, and each run of media as embeddings [m, hidden].

        Raises:
            InvalidArgument: there are several prompts, or padding; media and placeholders do not match; or this model
                tells its language part more about media than embeddings (positions in two dimensions, a mask of its
                own, features for later layers), so that a session would not give its answers.
        """
        ids = _ids_of(inputs)
        name = type(self._model).__name__
        try:
            self._model(**{key: self._placed(value) for key, value in inputs.items()}, use_cache=False)
        except _Handed as handed:
            embeds = _checked(handed, len(ids), name)
        except Exception as error:  # a model may raise anything where media and placeholders do not match
            raise InvalidArgument(f"{name} cannot encode this: {error}") from error
        else:
            raise InvalidArgument(f"{name} did not ask its language part")
        pieces: list[list[int] | Tensor] = []
        first = 0
        for is_text, run in groupby(embeds.isposinf().all(dim=-1).tolist()):
            end = first + len(list(run))
            pieces.append(ids[first:end] if is_text else embeds[first:end])
            first = end
        return pieces

    def _placed(self, value: Any) -> Any:
        """An input where the encoder is, in its type of floats."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self._model.device, self._model.dtype if value.is_floating_point() else None)


class _Handed(Exception):
    """What a model hands to its language part, instead of an answer of that."""

    def __init__(self, embeds: Tensor | None, others: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeds = embeds
        self.others = others


class _Language(nn.Module):
    """Stands where the language part was. Its tokens are embedded as infinity: what is finite came from an encoder."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = _Infinity(hidden_size, dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, *, inputs_embeds: Tensor | None = None, **others: Any) -> None:
        raise _Handed(inputs_embeds, others)


class _Infinity(nn.Module):
    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, self._hidden_size), torch.inf, dtype=self._dtype, device=ids.device)


def _ids_of(inputs: Mapping[str, Any]) -> list[int]:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
        raise InvalidArgument('one prompt at a time: input_ids are a tensor [1, n] (return_tensors="pt")')
    if mask is not None and not bool(mask.all()):
        raise InvalidArgument("a prompt has no padding: its attention_mask has zeros")
    taken: list[int] = ids[0].tolist()
    return taken


def _checked(handed: _Handed, num_tokens: int, name: str) -> Tensor:
    """The embeddings [n, hidden], where the language part is handed nothing else that matters."""
    embeds = handed.embeds
    if embeds is None or embeds.shape[:2] != (1, num_tokens):
        raise InvalidArgument(f"{name} hands no embedding for each token to its language part")
    plain = torch.arange(num_tokens, device=embeds.device)
    for key, value in handed.others.items():
        if isinstance(value, Tensor):
            is_plain = (key == "attention_mask" and value.ndim == 2 and bool(value.all())) or (
                key == "position_ids"
                and value.shape[-1] == num_tokens
                and value.ndim < 3
                and bool((value == plain).all())
            )
        else:
            is_plain = value is None or isinstance(value, bool | int | str)
        if not is_plain and key not in _OF_ITS_CACHE:
            raise InvalidArgument(f"{name} hands {key} to its language part beside embeddings: a session cannot")
    is_text, is_media = embeds[0].isposinf().all(dim=-1), embeds[0].isfinite().all(dim=-1)
    if not bool((is_text | is_media).all()):
        raise InvalidArgument(f"the encoder of {name} returned what is not finite")
    return embeds[0]


def _load(checkpoint: str | PathLike[str], dtype: torch.dtype) -> tuple[PreTrainedModel, int]:
    """The model without its language part, and the width of embeddings."""
    try:
        config = AutoConfig.from_pretrained(checkpoint)
        text = config.get_text_config(decoder=True)
        # Without layers, and with one token: then what is stored of them is not read.
        text.num_hidden_layers, text.vocab_size = 0, 1
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = []
        text.pad_token_id = None  # an embedding's row for padding must be one of its rows
        with _quiet():
            model, report = AutoModel.from_pretrained(
                checkpoint, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
            )
        has_encoder = text is not config and _is_replaced(model, _Language(text.hidden_size, dtype))
    except Exception as error:  # transformers may raise anything
        raise InvalidArgument(f"cannot load an encoder from {checkpoint}: {error}") from error
    if not has_encoder:
        raise InvalidArgument(f"{checkpoint} is a {config.model_type}, which has no encoder before a language part")
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if lacking := {key for key in lacking if not key.startswith(_LANGUAGE_PARTS)}:
        raise InvalidArgument(f"{checkpoint} lacks an encoder's weights: {', '.join(sorted(lacking))}")
    return model.eval(), text.hidden_size


def _is_replaced(model: PreTrainedModel, language: _Language) -> bool:
    """Puts a module where a model has its language part; whether it is there now, and embeds the model's tokens."""
    model.set_decoder(language)
    try:
        return model.get_input_embeddings() is language.embeddings
    except NotImplementedError:
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of all weights that are not loaded, which is what we ask for."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
