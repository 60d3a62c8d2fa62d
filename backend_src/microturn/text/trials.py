"""Checks at load: compares streaming encoding and decoding with the tokenizer and template themselves."""

from __future__ import annotations

import random

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from microturn.errors import InvalidArgument
from microturn.text.chat import ChatTemplate
from microturn.text.detokenizer import Detokenizer, OutputState
from microturn.text.encoder import TextEncoder
from microturn.text.vocabulary import Vocabulary
from microturn.text.writer import HeldText, Writer

_TEXTS = (
    "It's 3 o'clock,  isn't it?\n\nNo: half past 12.5 (or so).",
    "Straße, naïve café; 你好，世界。 नमस्ते 👩‍👩‍👧 ok",
    "\tif x:\n        return f'{y}'  # done",
    " and then ",
)
_ORDERS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
_CHUNK_LEN = 7  # characters per chunk of the trial
_NUM_RANDOM_TEXTS = 200


def check_decoding(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Compares decoding token by token with the tokenizer's own decoding.

    Errors:
        InvalidArgument: the texts differ.
    """
    generator = random.Random(0)
    trials = [tokenizer.encode(text, add_special_tokens=False).ids for text in _TEXTS]
    for _ in range(_NUM_RANDOM_TEXTS):
        ids = generator.choices(range(tokenizer.get_vocab_size()), k=8)
        trials.append([token_id for token_id in ids if _is_text(vocabulary.text_bytes(token_id))])
    detokenizer = Detokenizer(vocabulary)
    for ids in trials:
        text, state = "", OutputState()
        for token_id in ids:
            piece, state = detokenizer.accept(state, token_id)
            text += piece.text
        if text != tokenizer.decode(ids):
            raise InvalidArgument(
                "this model's tokenizer makes text of all ids together and not one after the other, which streaming "
                f"needs (ids {ids}): give a model with a byte-level, SentencePiece or WordPiece tokenizer"
            )


def _is_text(data: bytes) -> bool:
    """Whether bytes are complete characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class ChatTrial:
    """Compares a chat written message by message, in chunks, with the template's own tokens for the whole chat.

    Args:
        tokenizer: one that still parses special tokens.
        template: its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> None:
        self._template = template
        for order in _ORDERS:
            self._messages = [{"role": role, "content": text} for role, text in zip(order, _TEXTS, strict=False)]
            if _is_possible(template, order):
                try:
                    self._whole_ids: list[int] = tokenizer.apply_chat_template(self._messages, return_dict=False)
                except Exception:
                    continue  # a template may accept each transition, but not all together
                break

    def check(self, encoder: TextEncoder) -> None:
        """Writes the chat and compares the ids.

        Errors:
            InvalidArgument: the ids differ.
        """
        writer = Writer(encoder, HeldText(), None, is_context_empty=True, puts_bos=False)
        previous: str | None = None
        for message in self._messages:
            writer.open_message(self._template, previous, message["role"])
            for start in range(0, len(message["content"]), _CHUNK_LEN):
                writer.write(message["content"][start : start + _CHUNK_LEN], parse_special=False)
                writer.cut()
            previous = message["role"]
        if writer.ids != self._whole_ids[: len(writer.ids)]:
            raise InvalidArgument(
                "this model's tokenizer gives other ids for a chat in pieces than for the whole chat: "
                "write the conversation yourself and send it without 'role'"
            )


def _is_possible(template: ChatTemplate, order: tuple[str, ...]) -> bool:
    try:
        for previous, role in zip((None, *order), order, strict=False):
            template.transition(previous, role, is_context_empty=previous is None)
    except InvalidArgument:
        return False
    return True
