"""Sessions whose window slides, over real gRPC: as long as they like, and equal to a plain reference."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

from microturn.kv.window import Window
from microturn_client import Client, ContextFull, FailedPrecondition, InvalidArgument, Session, Tokens, TurnEnd
from support.oracle import check_greedy

# As the server rounds it, with its default slack.
WINDOW = Window(num_sinks=16, length=64, slack=256)
MAX_CONTEXT = 800


def open_windowed(client: Client) -> Session:
    return client.session(overflow="window", sink_tokens=4, window_tokens=64, max_context=MAX_CONTEXT)


def take_turn(session: Session, history: list[int], given: list[int], max_tokens: int, **options: object) -> list[int]:
    """A turn; returns the positions of what it generated, and the history has all of it."""
    history += given
    first = len(history)
    for event in session.turn(given, max_tokens=max_tokens, ignore_eos=True, **options):
        match event:
            case Tokens():
                assert event.position == len(history)
                history += event.ids
            case TurnEnd(status):
                assert status.context_len == len(history)
                assert status.kept_len == len(history) - WINDOW.evicted(len(history))
    return list(range(first, len(history)))


def test_two_sessions_go_on_far_beyond_their_context(client: Client, smollm2: PreTrainedModel) -> None:
    rng = random.Random(1)
    histories: list[list[int]] = [[], []]
    generated: list[list[int]] = [[], []]
    with open_windowed(client) as first, open_windowed(client) as second:
        for _ in range(24):
            for session, history, positions in zip((first, second), histories, generated, strict=True):
                given = rng.choices(range(1000, 40_000), k=rng.randint(1, 80))
                positions += take_turn(session, history, given, max_tokens=4)
    for history, positions in zip(histories, generated, strict=True):
        assert len(history) > MAX_CONTEXT
        check_greedy(smollm2, history, positions, WINDOW)


def test_a_barge_in_within_the_slack_is_exact(client: Client, smollm2: PreTrainedModel) -> None:
    history = list(range(2000, 2700))
    with open_windowed(client) as session:
        for first in range(0, len(history), 175):
            session.append(history[first : first + 175])
        take_turn(session, history, [5, 6], max_tokens=20)
        heard = len(history) - 13
        del history[heard:]
        positions = take_turn(session, history, [7], max_tokens=8, on_overlap="interrupt", rewind_to=heard)
        with pytest.raises(FailedPrecondition, match="the window has evicted"):
            session.turn([8], rewind_to=100).wait()
        positions += take_turn(session, history, [9], max_tokens=4)
    check_greedy(smollm2, history, positions, WINDOW)


def test_a_turn_without_room_beside_the_window_is_refused_and_the_session_goes_on(client: Client) -> None:
    with open_windowed(client) as session:
        session.append(list(range(100, 110)))
        with pytest.raises(ContextFull, match="beside its window"):
            session.append([5] * (MAX_CONTEXT - WINDOW.max_kept + 1))
        assert session.append([5] * (MAX_CONTEXT - WINDOW.max_kept)).context_len == 10 + MAX_CONTEXT - WINDOW.max_kept


def test_a_window_that_does_not_fit_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="leave no room for a turn"):
        client.session(overflow="window", window_tokens=64, max_context=400).append([5])
