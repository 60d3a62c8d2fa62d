"""Learns from a chat template's renderings what it writes between messages.

A template renders a whole conversation; a session needs to know what to append when the next message begins. So short
conversations with recognisable contents are rendered, in every order of roles that the template accepts, and the text
between two contents is the transition between their roles. It must depend on those two roles only, contents must appear
unchanged (except for whitespace around them; Llama 3.1 writes results of tools as JSON strings), and a longer
conversation must begin like the shorter one: a template that violates this rewrites text that was already appended, and
the roles concerned are refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from microturn.errors import InvalidArgument

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
Order = tuple[str, ...]  # roles of a conversation
Pair = tuple[str | None, str]  # roles of the message before (None at the beginning) and of the message

_BASE_PAIRS: set[Pair] = {(None, "user"), (None, "assistant"), ("user", "assistant"), ("assistant", "user")}
# Learnt one after the other, common ones first, so that errors with unusual orders do not affect the others.
_FURTHER_PAIRS: tuple[set[Pair], ...] = (
    {(None, "system"), ("system", "user")},
    {("system", "assistant")},
    {("user", "system"), ("assistant", "system")},
    {("assistant", "tool"), ("tool", "assistant")},
    {("tool", "tool")},
    {("tool", "user")},
    {("user", "tool"), ("system", "tool"), ("tool", "system")},
)
_MAX_NUM_MESSAGES = 4
_SPACES = (" \n ", "\n \n")  # around a content, to see whether all or none of it is kept


@dataclass(frozen=True, slots=True)
class Transition:
    """The text between two messages.

    Attributes:
        text: the end of the message before and the beginning of the next.
        drops_space_before: whether whitespace at the end of the content before is dropped.
        drops_space_after: whether whitespace at the beginning of the content after is dropped.
        escapes: whether the content after is written as within a JSON string.
    """

    text: str
    drops_space_before: bool
    drops_space_after: bool
    escapes: bool = False


def escaped(text: str) -> str:
    """A text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What was learnt about some roles.

    Attributes:
        texts: the text between two contents.
        drops_space: whether whitespace is dropped at the end of the first and at the beginning of the second content.
        escapes: by role, whether contents are written as within a JSON string.
    """

    texts: dict[Pair, str] = field(default_factory=dict)
    drops_space: dict[Pair, tuple[bool, bool]] = field(default_factory=dict)
    escapes: dict[str, bool] = field(default_factory=dict)

    def copy(self) -> _Learnt:
        return _Learnt(dict(self.texts), dict(self.drops_space), dict(self.escapes))


class _Rewrites(Exception):
    """The template rewrites messages; the argument says how."""


class ChatTemplate:
    """The transitions of one template with one list of tools.

    Attributes:
        answer_space: whitespace before an assistant's content that the template omits when it asks for an answer: a
            space that belongs to the answer's first word.

    Args:
        render: renders a conversation, followed by the beginning of an answer if the second argument is true; raises
            any exception if the template does not accept it.
        bos: the BOS token that the template may begin with.
        marker: a word that the template does not contain.

    Errors:
        InvalidArgument: the template rewrites messages of users or assistants.
    """

    def __init__(self, render: Render, bos: str, marker: str) -> None:
        self._render = render
        self._marker = marker
        self._refusals: dict[Pair, str] = {}
        self._learnt = _Learnt()
        try:
            self._learn(_BASE_PAIRS)
        except _Rewrites as rewrites:
            raise InvalidArgument(
                f"this model's chat template takes no messages one by one, because it {rewrites}: "
                "write the conversation yourself and send it without 'role'"
            ) from None
        for pair in ((None, "user"), ("user", "assistant")):
            if pair not in self._learnt.drops_space:
                reason = self._refusals.get(pair, "it leaves messages out")
                raise InvalidArgument(f"this model's chat template does not render a plain chat: {reason}")
        for pairs in _FURTHER_PAIRS:
            self._try_to_learn(pairs)
        later = [text for (previous, _), text in self._learnt.texts.items() if previous is not None]
        self._bos = "" if any(bos in text for text in later) else bos
        self.answer_space = self._learn_answer_space()

    def transition(self, previous: str | None, role: str, *, is_context_empty: bool) -> Transition:
        """The text to append when a message of `role` follows one of `previous`, or none.

        Errors:
            InvalidArgument: the template does not accept such a message there.
        """
        pair = (previous, role)
        if pair not in self._learnt.drops_space:
            where = "begins a conversation" if previous is None else f"follows role '{previous}'"
            reason = self._refusals.get(pair, "it has no such message there")
            raise InvalidArgument(f"role '{role}' {where}, which this model's chat template does not take: {reason}")
        text = self._learnt.texts[pair]
        text = text if is_context_empty else text.removeprefix(self._bos)
        return Transition(text, *self._learnt.drops_space[pair], self.escapes(role))

    def escapes(self, role: str) -> bool:
        """Whether contents of a role are written as within a JSON string."""
        return self._learnt.escapes.get(role, False)

    def _try_to_learn(self, pairs: set[Pair]) -> None:
        """Learns these pairs of roles if the template is consistent about them, and refuses them otherwise."""
        try:
            self._learn(pairs)
        except _Rewrites as rewrites:
            self._refusals |= dict.fromkeys(pairs, f"it {rewrites}")

    def _learn(self, pairs: set[Pair]) -> None:
        """Learns pairs of roles, all of them or none."""
        learnt = self._learnt.copy()
        orders = [order for order in _orders(pairs | learnt.texts.keys()) if not pairs.isdisjoint(_pairs(order))]
        for order in orders:
            self._learn_texts(order, learnt)
        for order, space in itertools.product(orders, _SPACES):
            self._learn_space(order, space, learnt)
        self._learnt = learnt

    def _learn_texts(self, order: Order, learnt: _Learnt) -> None:
        contents = [f"{self._marker}{index}." for index in range(len(order))]
        rendered = self._try_render(order, contents)
        if rendered is None:
            return
        end = 0
        for index, (pair, content) in enumerate(zip(_pairs(order), contents, strict=True)):
            at = rendered.find(content, end)
            if at < 0 and index == len(order) - 1 and content not in rendered:
                break  # some templates omit a message until the next one comes
            if at < 0 or rendered.count(content) > 1:
                raise _Rewrites(f"does not keep the message of role '{order[index]}' where it was ({_names(order)})")
            if learnt.texts.setdefault(pair, rendered[end:at]) != rendered[end:at]:
                raise _Rewrites(f"begins a message of role '{order[index]}' in several ways ({_names(order)})")
            end = at + len(content)

    def _learn_space(self, order: Order, space: str, learnt: _Learnt) -> None:
        contents = [self._difficult_content(index, role) for index, role in enumerate(order)]
        rendered = self._try_render(order, [f"{space}{content}{space}" for content in contents])
        if rendered is None:
            return
        end, space_before = 0, space
        for index, (pair, content) in enumerate(zip(_pairs(order), contents, strict=True)):
            role, space_after = order[index], space
            at = rendered.find(content, end)
            if is_escaped := at < 0 and role == "tool":
                content, space_after = escaped(content), escaped(space)
                at = rendered.find(content, end)
            if at < 0 and index == len(order) - 1 and f"{self._marker}{index}" not in rendered:
                break
            drops_space = _dropped_space(rendered[end:at], learnt.texts.get(pair), space_before, space_after)
            is_same = drops_space is not None and learnt.drops_space.setdefault(pair, drops_space) == drops_space
            is_trimmed = is_escaped and drops_space is not None and drops_space[1]
            if at < 0 or not is_same or is_trimmed or learnt.escapes.setdefault(role, is_escaped) != is_escaped:
                raise _Rewrites(f"changes what the message of role '{role}' says ({_names(order)})")
            end, space_before = at + len(content), space_after

    def _learn_answer_space(self) -> str:
        content = f"{self._marker}0."
        rendered = self._try_render(("user",), [content], asks_for_answer=True)
        asking, text = (rendered or "").partition(content)[2], self._learnt.texts["user", "assistant"]
        return text.removeprefix(asking) if text.startswith(asking) and text.rstrip() == asking.rstrip() else ""

    def _difficult_content(self, index: int, role: str) -> str:
        """Content that some templates escape, truncate or parse."""
        thought = "<think>why</think>" if role == "assistant" else ""
        return f"{self._marker}{index}.{thought} \"b\" 'c' \\d <e> & é\n\n{{{{f}}}} {self._marker}{index}!"

    def _try_render(self, order: Order, contents: Sequence[str], *, asks_for_answer: bool = False) -> str | None:
        messages = [{"role": role, "content": content} for role, content in zip(order, contents, strict=True)]
        try:
            return self._render(messages, asks_for_answer)
        except Exception as error:
            # A template may raise any exception for a conversation that it does not accept.
            pair = list(_pairs(order))[-1]
            self._refusals.setdefault(pair, str(error) or type(error).__name__)
            return None


def _dropped_space(between: str, text: str | None, before: str, after: str) -> tuple[bool, bool] | None:
    """Whether whitespace is missing before and after a transition's text; None if it isn't that text."""
    for drops_before, drops_after in itertools.product((False, True), repeat=2):
        if text is not None and between == before * (not drops_before) + text + after * (not drops_after):
            return drops_before, drops_after
    return None


def _orders(pairs: Set[Pair]) -> Iterator[Order]:
    """Orders of messages in which only these roles follow each other, the shortest first."""
    orders: list[Order] = [(role,) for previous, role in sorted(pairs, key=str) if previous is None]
    for _ in range(_MAX_NUM_MESSAGES):
        yield from orders
        orders = [
            (*order, role) for order in orders for previous, role in sorted(pairs, key=str) if previous == order[-1]
        ]


def _pairs(order: Order) -> Iterator[Pair]:
    return zip((None, *order), order, strict=False)


def _names(order: Order) -> str:
    return " → ".join(order)
