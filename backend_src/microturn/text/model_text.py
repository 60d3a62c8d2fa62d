"""A model's tokenizer and chat template: loaded and checked once, shared by all sessions.

Both are checked by trials: if ids cannot be decoded one by one, loading fails; if a chat template cannot be followed
message by message, `role` is refused.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Self

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from microturn.errors import InvalidArgument
from microturn.text.chat import ChatTemplate
from microturn.text.chat_templates import NO_TOOLS, ChatTemplates
from microturn.text.detokenizer import Detokenizer
from microturn.text.embedded import drop_ids_beyond, has_ids_beyond
from microturn.text.encoder import TextEncoder
from microturn.text.grammar import Grammars
from microturn.text.grammar_vocabulary import TokenTexts
from microturn.text.prepared_text import PreparedText, prepare_text
from microturn.text.tool_formats import ToolFormat
from microturn.text.trials import ChatTrial, check_decoding
from microturn.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)


class ModelText:
    """A model's tokenizer and chat template.

    Attributes:
        vocab_size: number of tokens that have a text.
        eos_ids: ids that end an answer, as the model's files say.
        encoder: text to ids.
        detokenizer: ids to text.
        tool_format: how the model writes tool calls; None where that is not known.
        spans_words: whether its tokens can span words, so that text is held until a turn generates.

    Args:
        tokenizer: a fast tokenizer; modified here, not to be used by others.
        eos_ids: as above.

    Errors:
        InvalidArgument: the tokenizer cannot decode token by token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> None:
        self.vocab_size = len(tokenizer)
        self.eos_ids = eos_ids
        self._templates: ChatTemplates | None = None
        self._no_roles = "this model has no chat template: send text without 'role' and 'tools'"
        trial = self._begin_chat_trial(tokenizer) if tokenizer.chat_template else None

        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder().items()
        special_ids = {token.content: token_id for token_id, token in added if token.special}
        self.tool_format = ToolFormat.of(json.dumps(tokenizer.chat_template, ensure_ascii=False), special_ids)
        vocabulary = self._vocabulary = Vocabulary(backend, eos_ids)
        self._backend = backend
        check_decoding(backend, vocabulary)
        self.detokenizer = Detokenizer(vocabulary)
        self.encoder = TextEncoder(backend, vocabulary)
        self.spans_words = " " not in self.encoder.boundaries.openers
        if self.spans_words:
            log.warning("tokens of this model can span words: text is held until a turn generates")
        if trial is not None:
            try:
                trial.check(self.encoder)
            except InvalidArgument as error:
                self._refuse_roles(error)

    @classmethod
    def from_directory(cls, directory: Path, num_ids: int | None = None) -> Self:
        """Loads the tokenizer of a model.

        Args:
            directory: of the model.
            num_ids: rows of its embedding, if they are known: see `drop_ids_beyond`.

        Errors:
            InvalidArgument: there is none, or it cannot be used.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            # A broken file can raise anything: an error of JSON or Rust, a missing key.
            reason = str(error).strip().partition("\n")[0]
            raise InvalidArgument(
                f"the tokenizer in {directory} cannot be loaded ({type(error).__name__}: {reason})"
            ) from error
        if not tokenizer.is_fast:
            raise InvalidArgument(f"{directory} has no tokenizer.json: save a fast tokenizer there")
        if num_ids is not None:
            drop_ids_beyond(tokenizer, num_ids)
        return cls(tokenizer, _eos_ids(directory, tokenizer))

    def has_ids_beyond(self, num_ids: int) -> bool:
        """Whether it has tokens whose ids are not below `num_ids`."""
        return has_ids_beyond(self._backend, num_ids)

    def prepare(self, text: str, parse_special: bool, enough: int, /) -> PreparedText:
        """Encodes a text as far as possible without its context; see `prepare_text`."""
        return prepare_text(self.encoder, text, parse_special=parse_special, enough=enough)

    def grammars(self, num_ids: int) -> Grammars | None:
        """Grammars over the model's `num_ids` logits; None where no id ends an answer."""
        eos_ids = {token_id for token_id in self.eos_ids if token_id < num_ids}
        return Grammars(partial(self._token_texts, num_ids), eos_ids, self.tool_format) if eos_ids else None

    def _token_texts(self, num_ids: int) -> TokenTexts:
        texts = [self._vocabulary.text_bytes(token_id) for token_id in range(num_ids)]
        added = self._backend.get_added_tokens_decoder().items()
        special = {token_id: token.content for token_id, token in added if token.special and token_id < num_ids}
        return TokenTexts(texts, special, lambda text: self._backend.encode(text, add_special_tokens=False).ids)

    def chat_template(self, tools: str = NO_TOOLS) -> ChatTemplate:
        """The chat template with tools, given as `tools_as_json` writes them.

        Errors:
            InvalidArgument: the model has none that can be followed message by message, or it refuses the tools.
        """
        if self._templates is None:
            raise InvalidArgument(self._no_roles)
        return self._templates.with_tools(tools)

    def _begin_chat_trial(self, tokenizer: PreTrainedTokenizerBase) -> ChatTrial | None:
        self._templates = ChatTemplates(tokenizer)
        try:
            return ChatTrial(tokenizer, self._templates.with_tools(NO_TOOLS))
        except InvalidArgument as error:
            self._refuse_roles(error)
            return None

    def _refuse_roles(self, error: InvalidArgument) -> None:
        self._templates = None
        self._no_roles = str(error.args[0])
        log.warning("option 'role' is refused: %s", self._no_roles)


def _eos_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-sequence ids of the generation config, else of the config; and the tokenizer's."""
    found: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        configured = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.exists() else None
        if configured is not None:
            return frozenset(found | ({configured} if isinstance(configured, int) else set(configured)))
    return frozenset(found)
