"""A realtime session without end: what its window has left is forgotten, and all else can be edited as ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from microturn_gateway.window import Window
from support.realtime_driver import Driver, WindowDriver, error_of, types


@pytest.fixture
def talk() -> WindowDriver:
    return WindowDriver(instructions="Be brief.")


def test_a_session_goes_on_beyond_its_context_and_keeps_what_can_be_edited(talk: WindowDriver) -> None:
    sizes = []
    for _ in range(100):
        talk.exchange()
        talk.check()
        sizes.append((len(talk.realtime.talk.conversation.items), len(talk.realtime.talk.context.pieces)))
    assert len(talk.server) > 1000
    assert max(sizes) <= (14, 14)
    assert talk.server.text.count("Be brief.") == 1


def test_what_is_forgotten_is_not_there_and_the_rest_is_edited_as_ever(talk: WindowDriver) -> None:
    for _ in range(20):
        last = talk.exchange()
    for kind, fields in (("delete", {}), ("retrieve", {}), ("truncate", {"content_index": 0, "audio_end_ms": 0})):
        talk.send(f"conversation.item.{kind}", item_id="q1", **fields)
        assert error_of(talk.run())["code"] == "item_not_found"
    talk.send("conversation.item.delete", item_id=last)
    assert types(talk.run()) == ["conversation.item.deleted"]
    assert "question 20" not in talk.server.text
    assert talk.server.text.endswith("answer 20.")
    talk.check()


def test_results_whose_calls_are_forgotten_stay_as_they_were_told(talk: WindowDriver) -> None:
    for num_exchanges in range(12):
        talk.results("c", "a", "b")
        assert "error" not in types(talk.run())
        for _ in range(num_exchanges):
            talk.exchange()
            talk.check()
            assert talk.events[-1]["response"]["status"] == "completed"
        number = talk.num_words - num_exchanges
        assert f"<tool>a of {number}.b of {number}.c of {number}." in talk.server.text


def test_an_item_follows_the_one_that_its_client_sent_before_it(talk: WindowDriver) -> None:
    """Also where results were told in another order, and something is forgotten at each edit."""
    for _ in range(20):
        talk.exchange()
    talk.results("c", "a", "b")
    last_id = talk.run()[-1]["item"]["id"]
    talk.item("question")
    assert talk.run()[0]["previous_item_id"] == last_id
    talk.check()


def test_what_would_cut_behind_the_window_is_refused_and_nothing_is_lost(talk: WindowDriver) -> None:
    for _ in range(20):
        talk.exchange()
    talk.item("first of all", previous_item_id="root")
    assert error_of(talk.run())["code"] == "failed_precondition"
    talk.send("session.update", session={"type": "realtime", "instructions": "Be long.", "max_output_tokens": 9})
    updated, error = talk.run()
    assert (updated["session"]["instructions"], updated["session"]["max_output_tokens"]) == ("Be brief.", 9)
    assert error["error"]["param"] == "session.instructions"
    talk.exchange()
    talk.check()


def test_a_window_is_chosen_before_the_first_turn(driver: Driver) -> None:
    asked = {"overflow": "window", "window_tokens": 80, "sink_tokens": 16}
    driver.send("session.update", session={"type": "realtime", "microturn": asked})
    [updated] = driver.run()
    assert updated["session"]["microturn"].items() >= asked.items()
    driver.item("Hello")
    driver.run()
    driver.send("session.update", session={"type": "realtime", "microturn": {**asked, "window_tokens": 90}})
    updated, error = driver.run()
    assert updated["session"]["microturn"].items() >= asked.items()
    assert error["error"]["param"] == "session.microturn.overflow"
    driver.send("session.update", session={"type": "realtime", "microturn": asked})
    assert types(driver.run()) == ["session.updated"]


@pytest.mark.parametrize(
    ("then", "window"),
    [
        ({"overflow": "error"}, None),
        ({"window_tokens": 90}, Window(90, 16)),
        ({"overflow": "window", "sink_tokens": 0}, Window(80, 0)),
        ({}, Window(80, 16)),
    ],
)
def test_until_the_first_turn_a_window_can_be_changed(
    driver: Driver, then: dict[str, Any], window: Window | None
) -> None:
    for asked in ({"overflow": "window", "window_tokens": 80, "sink_tokens": 16}, then):
        driver.send("session.update", session={"type": "realtime", "microturn": asked})
        [updated] = driver.run()
    assert updated["session"]["microturn"].get("window_tokens") == (window and window.window_tokens)
    driver.item("Hello")
    driver.run()
    assert driver.realtime.talk.window == window


def test_a_window_behind_the_first_event_comes_too_late_though_that_waits_still(driver: Driver) -> None:
    driver.item("Hello")
    driver.send("session.update", session={"microturn": {"overflow": "window", "window_tokens": 80, "sink_tokens": 0}})
    assert error_of(driver.run())["param"] == "session.microturn.overflow"
    assert driver.realtime.talk.window is None


@pytest.mark.parametrize(
    ("bad", "code", "name"),
    [
        ({"window_tokens": 80}, "invalid_value", "window_tokens"),
        ({"overflow": "error", "sink_tokens": 4}, "invalid_value", "sink_tokens"),
        ({"overflow": "window"}, "invalid_value", "window_tokens"),
        ({"overflow": "window", "window_tokens": 9, "sink_tokens": -1}, "invalid_value", "sink_tokens"),
        ({"overflow": "forget"}, "invalid_value", "overflow"),
        ({"overflow": "window", "window_tokens": -1}, "invalid_value", "window_tokens"),
    ],
)
def test_a_window_that_cannot_be_is_refused(driver: Driver, bad: dict[str, Any], code: str, name: str) -> None:
    driver.send("session.update", session={"type": "realtime", "microturn": bad})
    events = driver.run()
    assert "overflow" not in events[0]["session"]["microturn"]
    assert (error_of(events)["code"], error_of(events)["param"]) == (code, f"session.microturn.{name}")


@pytest.mark.parametrize("seed", range(40))
def test_random_edits_leave_the_context_that_the_items_make(seed: int) -> None:
    draw = random.Random(seed)
    talk = WindowDriver(instructions=draw.choice(["", "Be brief."]))
    talk.exchange()
    for _ in range(120):
        talk.do_answers_end = draw.random() < 0.7
        items = talk.realtime.talk.conversation.items
        item = draw.choice(items) if items else None
        match draw.choice(["exchange", "exchange", "append", "delete", "truncate", "insert", "clear", "results"]):
            case "results":
                talk.results(*draw.sample("abcd", draw.randrange(1, 5)))
            case "append":
                for _ in range(draw.choice([1, 12])):
                    talk.append(draw.choice(["well ", "so", "a longer thing to say "]))
            case "delete" if item is not None:
                talk.send("conversation.item.delete", item_id=item.id)
            case "truncate" if item is not None:
                talk.send("conversation.item.truncate", item_id=item.id, text_end_chars=draw.randrange(9))
            case "insert":
                talk.item("beside", draw.choice(["user", "system"]), previous_item_id=item.id if item else "root")
            case "clear":
                talk.send("input_text_buffer.clear")
            case _:
                talk.exchange()
        talk.now_s += 1
        talk.run()
        talk.check()
    assert len(talk.realtime.talk.conversation.items) < 30
