"""Events that wait for a slow reader."""

from __future__ import annotations

import json
from typing import Any

from microturn_gateway.outbox import Outbox


def delta(text: str, item_id: str = "a", position: int = 0) -> dict[str, Any]:
    told = {"token_ids": [len(text)], "position": position}
    return {"type": "response.output_text.delta", "item_id": item_id, "delta": text, "microturn": told}


def taken(outbox: Outbox) -> list[dict[str, Any]]:
    events = []
    while (text := outbox.take()) is not None:
        events.append(json.loads(text))
    return events


def test_text_of_one_answer_that_waits_becomes_one_event() -> None:
    outbox = Outbox()
    for position, text in enumerate(("H", "ello", " there")):
        outbox.put(delta(text, position=7 + position))
    assert taken(outbox) == [
        {**delta("Hello there", position=7), "microturn": {"token_ids": [1, 4, 6], "position": 7}},
    ]


def test_what_is_not_text_of_the_same_answer_stays_apart_and_in_order() -> None:
    outbox = Outbox()
    events = [delta("a"), {"type": "error"}, delta("b"), delta("c", "other")]
    for event in events:
        outbox.put(event)
    assert taken(outbox) == events


def test_it_is_full_until_somebody_reads() -> None:
    outbox = Outbox()
    for _ in range(1000):
        outbox.put(delta("x"))
    assert not outbox.is_full
    for _ in range(31):
        outbox.put({"type": "error"})
    assert outbox.is_full
    outbox.take()
    assert not outbox.is_full
