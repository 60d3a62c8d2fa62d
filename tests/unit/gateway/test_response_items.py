"""What a response's items and those of the next request are together."""

from __future__ import annotations

import pytest

from microturn_gateway.response_items import Called, ConversationItem, Returned, Said, gone_on

QUESTION, ANSWER = Said("user", "Weather?"), Said("assistant", " I look. It takes a moment.\n")
CALL, RESULT, NEXT = Called("a", "get_weather", "{}"), Returned("a", "sunny"), Said("user", "And?")
HEARD = Said("assistant", "I look.")
OTHER = Said("assistant", "It is late.")


@pytest.mark.parametrize(
    ("earlier", "items", "expected"),
    [
        ([QUESTION, CALL], [CALL, RESULT], [QUESTION, CALL, RESULT]),
        ([QUESTION, ANSWER], [Said("assistant", ANSWER.text.strip()), NEXT], [QUESTION, ANSWER, NEXT]),
        ([QUESTION, ANSWER, CALL], [ANSWER, CALL, RESULT], [QUESTION, ANSWER, CALL, RESULT]),
        ([QUESTION, ANSWER, CALL], [CALL, RESULT], [QUESTION, ANSWER, CALL, RESULT]),
        ([QUESTION, ANSWER], [HEARD, NEXT], [QUESTION, HEARD, NEXT]),
        ([QUESTION, ANSWER, NEXT], [ANSWER], [QUESTION, ANSWER, NEXT, ANSWER]),
        ([QUESTION, ANSWER], [OTHER, NEXT], [QUESTION, ANSWER, OTHER, NEXT]),
        ([QUESTION, ANSWER], [Said("assistant", ""), NEXT], [QUESTION, ANSWER, Said("assistant", ""), NEXT]),
        ([], [ANSWER, CALL, RESULT], [ANSWER, CALL, RESULT]),
    ],
    ids=[
        *("a call", "an answer, trimmed", "an answer with a call", "the call alone", "what was heard of an answer"),
        *("not the last answer", "another text", "nothing", "no earlier response"),
    ],
)
def test_an_answer_that_comes_again_stands_there_once(
    earlier: list[ConversationItem], items: list[ConversationItem], expected: list[ConversationItem]
) -> None:
    """LiveKit Agents sends it again beside `previous_response_id`."""
    assert gone_on(earlier, items) == tuple(expected)
