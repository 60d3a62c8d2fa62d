"""Who holds the longest beginning is found as by looking at each holder."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from microturn_client import MessageRole
from microturn_gateway.context import Cut, HeldContext, Message, Piece
from microturn_gateway.prefix_tree import PrefixTree

ROLES: Sequence[MessageRole] = ("user", "assistant", "tool", "assistant")


def held(*texts: str) -> HeldContext:
    """A context with a token for each character: said by a user, answered, and so on."""
    context, end = HeldContext(), 0
    for index, text in enumerate(texts):
        role, begin, end = ROLES[index % len(ROLES)], end, end + len(text)
        cuts = tuple(Cut(num, begin + num) for num in range(len(text) + 1)) if role == "assistant" else ()
        context.answer(Piece(role, text, end, cuts), end)
    return context


def said(*texts: str) -> list[Message]:
    return [Message(ROLES[index % len(ROLES)], text) for index, text in enumerate(texts)]


def tree_of(*contexts: HeldContext) -> PrefixTree[HeldContext]:
    tree = PrefixTree[HeldContext]()
    for context in contexts:
        tree.put(context, "owner", context.pieces)
    return tree


def test_the_longest_beginning_is_found() -> None:
    short, long = held("Hello", "Hi"), held("Hello", "Hi", "What?", "Nothing")
    tree = tree_of(long, short)
    assert tree.nearest("owner", said("Hello", "Hi", "What?", "Nothing", "Bye")) == [long]
    assert tree.nearest("owner", said("Hello", "Hi", "Why?")) == [short, long]
    assert tree.nearest("owner", said("Help")) == []
    assert tree.nearest("another", said("Hello", "Hi")) == []


def test_an_answer_shares_what_was_heard_of_it() -> None:
    one, other = held("Hello", "Hi there"), held("Hello", "Hi you")
    tree = tree_of(one, other)
    assert tree.nearest("owner", said("Hello", "Hi th", "Stop")) == [one]
    assert tree.nearest("owner", said("Hello", "Hi", "Stop")) == [other, one]
    assert tree.nearest("owner", said("Hello", "No", "Stop")) == [other, one]


def test_an_answer_is_found_without_its_surrounding_space_but_an_exact_one_first() -> None:
    space, exact = held("Hello", "Yes\n", "So?"), held("Hello", "Yes", "And?")
    assert tree_of(space, held("Hello", "Yes, Sir")).nearest("owner", said("Hello", "Yes", "So?")) == [space]
    assert tree_of(exact, space).nearest("owner", said("Hello", "Yes", "So?")) == [exact]


def test_a_message_that_grows_is_found_and_a_result_that_does_not() -> None:
    one = held("Hello", "Hi", "12", "Twelve")
    tree = tree_of(one, held("Hello"))
    assert tree.nearest("owner", [Message("user", "Hello you")])[-1] is one
    assert tree.nearest("owner", said("Hello", "Hi", "123")) == [one]
    assert tree.nearest("owner", [Message("user", "Hell")]) == []


def test_what_is_put_again_is_where_it_was_put_last_and_what_is_removed_is_nowhere() -> None:
    one, other = held("Hello", "Hi"), held("Hello", "Hi", "Bye")
    tree = tree_of(one, other)
    tree.put(one, "owner", one.pieces[:1])
    assert tree.nearest("owner", said("Hello", "Hi")) == [other]
    assert tree.nearest("owner", said("Hello")) == [one, other]
    tree.remove(other)
    tree.remove(one)
    tree.remove(one)
    assert tree.nearest("owner", said("Hello")) == []
    assert one not in tree
    assert not tree._ends
    assert not tree._top.children


_TEXTS = st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=4)


@given(st.lists(_TEXTS, max_size=6), st.lists(st.integers(0, 5), max_size=3), _TEXTS)
def test_it_is_what_a_look_at_each_finds(
    all_texts: list[list[str]], removed: list[int], conversation: list[str]
) -> None:
    contexts = [held(*texts) for texts in all_texts]
    tree = tree_of(*contexts)
    for index in sorted(set(removed), reverse=True):
        if index < len(contexts):
            tree.remove(contexts.pop(index))
    asked = said(*conversation)
    longest = max((context.shared_len(asked) for context in contexts), default=0)
    found = tree.nearest("owner", asked)
    assert [context.shared_len(asked) for context in found] == [longest] * len(found)
    assert bool(found) == bool(longest)
    alike = [context for context in contexts if context.shared_len(asked) == longest > 0]
    assert found == alike[::-1]
