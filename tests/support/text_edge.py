"""A model's text edge beside the tokenizer that it must agree with, and a session of it that keeps its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from microturn.text.chat_templates import tools_as_json
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText


@dataclass
class Context:
    """A session's text and the ids that it became.

    Attributes:
        text: the session's text.
        ids: the context.
    """

    text: SessionText
    ids: list[int] = field(default_factory=list)

    @property
    def last_id(self) -> int | None:
        return self.ids[-1] if self.ids else None

    def write(
        self, text: str, *, role: str | None = None, parse_special: bool = False, flush: bool = False
    ) -> list[int]:
        new_ids = self.text.append_text(
            text, role=role, parse_special=parse_special, flush=flush, last_token_id=self.last_id
        )
        self.ids += new_ids
        return new_ids

    def make_way(self, *, role: str | None = None, before: Sequence[int] = ()) -> list[int]:
        """A turn of ids, or one that generates without input."""
        new_ids = self.text.append_other(role=role, last_token_id=self.last_id, input_follows=bool(before))
        self.ids += [*new_ids, *before]
        return new_ids

    def generate(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """A generation that samples these ids, until a stop string; returns its text."""
        text = ""
        self.text.begin_generation(stop)
        for token_id in ids:
            self.ids.append(token_id)
            piece = self.text.accept(token_id)
            text += piece.text
            if piece.stop is not None:
                break
        return text + self.text.end_generation()


class TextEdge:
    """A model's text.

    Args:
        model: what is tested.
        oracle: transformers' tokenizer of the same directory.
        has_system: whether its template takes a system message at the beginning.
    """

    def __init__(self, model: ModelText, oracle: PreTrainedTokenizerBase, *, has_system: bool) -> None:
        self.model = model
        self.oracle = oracle
        self.has_system = has_system

    def open(self, tools: Sequence[dict] | None = None) -> Context:
        return Context(SessionText(self.model, tools_as_json(tools or [])))

    def chat_ids(self, messages: Sequence[tuple[str, str]], tools: Sequence[dict] | None = None) -> list[int]:
        """What the model's own template makes of a whole chat, up to the beginning of an answer."""
        conversation = [{"role": role, "content": content} for role, content in messages]
        return self.oracle.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, return_dict=False)

    def plain_ids(self, text: str) -> list[int]:
        """What a text is at the beginning of a context, its special tokens as text."""
        return self.oracle(text, split_special_tokens=True).input_ids
