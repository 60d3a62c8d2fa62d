"""Tokens that a model has an embedding for: a tokenizer may have been given more than the model knows."""

from __future__ import annotations

import json
import logging

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from microturn.errors import InvalidArgument

log = logging.getLogger(__name__)


def has_ids_beyond(tokenizer: Tokenizer, num_ids: int) -> bool:
    """Whether a tokenizer has tokens whose ids are not below `num_ids`."""
    added = tokenizer.get_added_tokens_decoder()
    return max(added, default=-1) >= num_ids or tokenizer.get_vocab_size(with_added_tokens=False) > num_ids


def drop_ids_beyond(tokenizer: PreTrainedTokenizerFast, num_ids: int) -> None:
    """Takes added tokens out of a tokenizer that a model has no embedding for: what they stand for is plain text then.

    Args:
        tokenizer: is changed.
        num_ids: rows of the embedding.

    Raises:
        InvalidArgument: tokens of its own vocabulary are among them, which no text can do without.
    """
    backend = tokenizer.backend_tokenizer
    num_own = backend.get_vocab_size(with_added_tokens=False)
    if num_own > num_ids:
        raise InvalidArgument(
            f"the tokenizer has {num_own} tokens and the model's embedding {num_ids}: they are of different models"
        )
    described = json.loads(backend.to_str())
    dropped = [token["content"] for token in described["added_tokens"] if token["id"] >= num_ids]
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < num_ids]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    log.warning(
        "%d tokens were added to the tokenizer and not to the model's embedding (%d rows), and are plain text here: %s",
        len(dropped),
        num_ids,
        ", ".join(dropped[:5]),
    )
