"""A model's chat template with any list of tools.

A model may have several templates, tools change the text, and some templates write today's date. `chat` learns the
transitions.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from microturn.errors import InvalidArgument
from microturn.text.chat import ChatTemplate, Message

if TYPE_CHECKING:  # `microturn serve` reads options too, and this import takes half a second
    from transformers import PreTrainedTokenizerBase

_MAX_NUM_KEPT = 32
NO_TOOLS = ""


def tools_as_json(tools: Sequence[Mapping[str, object]]) -> str:
    """A session's tools in one text, as they are passed on: a key of caches, however many they are."""
    return json.dumps(list(tools), ensure_ascii=False) if tools else NO_TOOLS


class ChatTemplates:
    """Learns the template with given tools, and caches the latest ones.

    Args:
        tokenizer: has a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._source = json.dumps(tokenizer.chat_template)
        # A learnt template, or the error.
        self._kept: OrderedDict[tuple[str, str], ChatTemplate | InvalidArgument] = OrderedDict()
        self._lock = threading.Lock()

    def with_tools(self, tools: str) -> ChatTemplate:
        """The template with these tools; callable in any thread. Takes some milliseconds unless it is cached.

        Args:
            tools: from `tools_as_json`.

        Errors:
            InvalidArgument: the template rewrites messages, or does not take these tools.
        """
        today = datetime.date.today().isoformat() if "strftime_now" in self._source else ""
        with self._lock:
            known = self._kept.get((tools, today))
        if known is None:
            try:
                known = self._learn(tools)
            except InvalidArgument as error:
                known = error
        with self._lock:
            self._kept[tools, today] = known
            self._kept.move_to_end((tools, today))
            if len(self._kept) > _MAX_NUM_KEPT:
                self._kept.popitem(last=False)
        if isinstance(known, InvalidArgument):
            raise InvalidArgument(*known.args)
        return known

    def _learn(self, tools: str) -> ChatTemplate:
        if tools != NO_TOOLS:
            self._check(tools)
        marker = "said"
        while marker in self._source or marker in tools:
            marker += "x"
        bos = self._tokenizer.bos_token or ""
        return ChatTemplate(
            lambda messages, asks_for_answer: self._render(messages, tools, asks_for_answer=asks_for_answer),
            bos,
            marker,
        )

    def _check(self, tools: str) -> None:
        question = {"role": "user", "content": "?"}
        try:
            tools.encode()
            changed = self._render([question], tools)
        except Exception as error:
            # A template may raise any exception for tools that it does not accept.
            raise InvalidArgument(f"this model's chat template does not take these tools: {error}") from error
        if changed == self._render([question], NO_TOOLS):
            raise InvalidArgument("this model's chat template has no place for tools: describe them in a message")

    def _render(self, messages: Sequence[Message], tools: str, *, asks_for_answer: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=json.loads(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=asks_for_answer,
        )
        return text
