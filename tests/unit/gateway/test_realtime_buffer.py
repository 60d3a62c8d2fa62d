"""A message that stays open for hours: each micro-turn of it costs what the first did, and a window bounds it."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from microturn_gateway.client_events import AppendBuffer, ClientEvent, CommitBuffer
from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal
from microturn_gateway.talk import Talk
from microturn_gateway.window import Window
from support.realtime_driver import WINDOW, Driver, WindowDriver, error_of, types
from support.simulated_context import SimulatedContext

WORD = " word"
NUM_COUNTED = 20_000
NUM_TOLD = 500  # where the server's whole context is compared


class Text(str):
    """Counts how many characters of all texts are compared or sliced."""

    num_read = 0

    def __add__(self, other: str) -> Text:
        return Text(super().__add__(other))

    def __getitem__(self, key: Any) -> Text:
        part = Text(super().__getitem__(key))
        Text.num_read += len(part)
        return part

    def __eq__(self, other: object) -> bool:
        Text.num_read += len(self)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Listener:
    """A talk that hears words, on a server with a token a character.

    Attributes:
        num_calls: of functions, in the last edit.
        num_read: characters that it compared or sliced.
    """

    def __init__(self, window: Window | None = None) -> None:
        self.talk = Talk(())
        self.talk.window = window
        self.num_calls = 0
        self.num_read = 0

    def edit(self, event: ClientEvent) -> list[Message]:
        self.num_calls = Text.num_read = 0
        before = sys.getprofile()
        gc.disable()  # what other tests left is not finalized meanwhile
        sys.setprofile(self._count)
        try:
            missing = self.talk.edit(event, "", is_implied=False)
        finally:
            sys.setprofile(before)
            gc.enable()
        self.num_read = Text.num_read
        return missing

    def hear(self, *, fails: bool = False) -> None:
        """One micro-turn, which the server may refuse."""
        [message] = self.edit(AppendBuffer(Text(WORD)))
        assert message == Message("user", WORD)
        if fails:
            self.talk.undo(has_begun=False)
        else:
            self.talk.context.append(message, self.talk.context.end + len(WORD))

    def _count(self, _frame: object, event: str, _arg: object) -> None:
        self.num_calls += event in ("call", "c_call")


def test_a_micro_turn_costs_the_same_however_much_was_said() -> None:
    listener = Listener()
    listener.hear()
    for number in range(2 * NUM_COUNTED):
        listener.hear(fails=number % 2 == 0)
        assert listener.num_calls < 100
        assert listener.num_read <= len(WORD)
    [item] = listener.talk.conversation.items
    assert len(item.content) == len(WORD) * (NUM_COUNTED + 1), "without a window all of it can be edited"


def test_with_a_window_a_micro_turn_costs_the_same_and_only_the_end_is_kept() -> None:
    listener = Listener(WINDOW)
    num_calls = num_read = 0
    for _ in range(NUM_COUNTED):
        listener.hear()
        [item] = listener.talk.conversation.items
        assert len(item.content) <= 2 * WINDOW.window_tokens + 2 * len(WORD)
        assert len(listener.talk.context.pieces) * len(WORD) == len(item.content)
        assert listener.num_calls < 20 * WINDOW.window_tokens
        assert listener.num_read < 20 * WINDOW.window_tokens
        num_calls, num_read = num_calls + listener.num_calls, num_read + listener.num_read
    assert num_calls < NUM_COUNTED * 100
    assert num_read < NUM_COUNTED * 20 * len(WORD)


def test_a_commit_reads_each_micro_turn_of_its_message_a_few_times() -> None:
    listener = Listener()
    for _ in range(NUM_TOLD):
        listener.hear()
    assert listener.edit(CommitBuffer()) == []
    assert listener.num_read < 20 * NUM_TOLD * len(WORD)


@pytest.mark.parametrize("word", [WORD, (7, 8)])
@pytest.mark.parametrize("role", ["user", "system"])
def test_a_buffer_longer_than_its_window_is_committed_and_gone_on_from(role: str, word: str | tuple[int, ...]) -> None:
    talk, fresh = (WindowDriver(instructions="Be brief.") for _ in range(2))
    for each in (talk, fresh):
        each.exchange()
        each.item("Listen.", role)
        each.run()
    for _ in range(NUM_TOLD):
        assert types(talk.append(word)) == ["input_text_buffer.appended"]
    talk.check()
    talk.send("input_text_buffer.commit")
    committed, added, done = talk.run()
    assert types([committed, added, done])[1:] == ["conversation.item.added", "conversation.item.done"]
    assert committed["previous_item_id"] is None, "what came before it is forgotten"
    [part] = done["item"]["content"]
    kept = part.get("text") or tuple(part["token_ids"])
    assert WINDOW.window_tokens <= len(kept) < WINDOW.window_tokens + 2 * len(word)
    assert kept == (word * NUM_TOLD)[-len(kept) :]
    fresh.append(word * NUM_TOLD)
    fresh.send("input_text_buffer.commit")
    for each in (talk, fresh):
        each.exchange()
        each.append("So")
        each.send("conversation.item.delete", item_id=each.exchange())
        each.run()
        each.check()
    assert talk.server.text == fresh.server.text
    for _ in range(20):
        talk.exchange()
    talk.send("conversation.item.retrieve", item_id=committed["item_id"])
    assert error_of(talk.run())["code"] == "item_not_found"


def test_a_buffer_longer_than_its_window_is_not_taken_back() -> None:
    talk = WindowDriver()
    for _ in range(NUM_TOLD):
        [*_, appended] = talk.append(WORD)
    talk.send("input_text_buffer.clear")
    assert error_of(talk.run())["code"] == "failed_precondition"
    talk.send("conversation.item.delete", item_id=appended["item_id"])
    assert error_of(talk.run())["code"] == "failed_precondition"
    talk.send("conversation.item.retrieve", item_id=appended["item_id"])
    [retrieved] = talk.run()
    assert (WORD * NUM_TOLD).endswith(retrieved["item"]["content"][0]["text"])
    talk.append(" more")
    talk.check()
    assert talk.server.text == "<user>" + WORD * NUM_TOLD + " more"
    talk.send("input_text_buffer.commit")
    last = talk.exchange()
    talk.send("conversation.item.delete", item_id=last)
    talk.append("aside")
    talk.send("input_text_buffer.clear")
    talk.run()
    assert talk.server.text == f"<user>{WORD * NUM_TOLD} more<assistant>answer 1."


@pytest.mark.parametrize("word", [WORD, (7, 8)])
@pytest.mark.parametrize("event", ["input_text_buffer.commit", "input_text_buffer.clear", "conversation.item.delete"])
def test_without_a_window_all_of_a_buffer_can_be_edited(
    driver: Driver, event: str, word: str | tuple[int, ...]
) -> None:
    driver.item("Listen.", item_id="first")
    for _ in range(NUM_TOLD):
        [*_, appended] = driver.append(word)
    driver.send("conversation.item.retrieve", item_id=appended["item_id"])
    [part] = driver.run()[0]["item"]["content"]
    assert (part.get("text") or tuple(part["token_ids"])) == word * NUM_TOLD
    driver.send(event, **({"item_id": appended["item_id"]} if event.startswith("conversation") else {}))
    fresh = Driver()
    fresh.item("Listen.", item_id="first")
    if event == "input_text_buffer.commit":
        fresh.append(word * NUM_TOLD)
        fresh.send(event)
    for each in (driver, fresh):
        each.append("So")
        each.send("response.create")
        each.send("conversation.item.delete", item_id="first")
        each.run()
    assert driver.server.text == fresh.server.text


def test_a_micro_turn_that_fails_is_said_again(driver: Driver) -> None:
    for number in range(6):
        driver.send("input_text_buffer.append", text=f"{number} ")
        driver.now_s += 1
        if number % 2:
            driver.begin()
            driver.realtime.failed(Refusal("context_full", "no more"))
            assert error_of(driver.taken())["code"] == "context_full"
        driver.run()
    assert driver.server.text == "<user>0 2 4 "


def test_what_comes_before_an_open_message_may_change_under_it(driver: Driver) -> None:
    for text in ("so ", "the "):
        driver.append(text)
    driver.send("session.update", session={"type": "realtime", "instructions": "Be brief."})
    [_, refused] = driver.append((7, 8))
    assert error_of([refused])["code"] == "invalid_value"
    driver.append("first ")
    assert driver.server.text == "<system>Be brief.<user>so the first "
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    driver.send("session.update", session={"type": "realtime", "tools": [tool]})
    driver.server = SimulatedContext()  # tools are those of a session: it is another one
    driver.append("thing")
    assert driver.server.text == "<system>Be brief.<user>so the first thing"


def test_an_item_behind_an_open_message_stays_behind_it(driver: Driver) -> None:
    """A clear that failed has left the message open."""
    for text in ("so ", "the "):
        driver.append(text)
    driver.send("input_text_buffer.clear")
    driver.begin()
    driver.realtime.failed(Refusal("unavailable", "not now"))
    driver.item("Aside.", "system")
    for text in ("first ", "thing"):
        driver.append(text)
    assert driver.server.text == "<user>so the first thing<system>Aside."
