"""Somebody who uses the client library, as a Locust user: opens sessions, takes turns, and notes what they took.

The library's `Client` is for threads. Locust replaces threads by greenlets, and `init_gevent` lets gRPC wait in them:
so the code under test is the one that programs use. After any error a person drops the session and comes again a second
later; the client is told not to mend anything (`recovery=None`), since a load test wants to see what breaks.
"""

from __future__ import annotations

import random
import time
from typing import ClassVar, Unpack

import gevent
from locust import User, task

from load_tests.load.player import Player
from load_tests.load.record import Answered
from load_tests.load.recorder import Recorder
from load_tests.load.schedule import Schedule, phase
from load_tests.load.target import target_of
from microturn_client import Client, MicroturnError, Session, SessionOptions, Tokens, Turn, TurnEnd, TurnOptions

# A turn without an end for so long has failed.
TURN_TIMEOUT_S = 30.0
# Who plays the answer needs a new token so often; four of them last one beat of 200 ms.
TOKEN_S = 0.05
_PAUSE_AFTER_ERROR_S = 1.0


class Person(User):
    """Comes, does what its scenario says until it is stopped, and leaves.

    Attributes:
        recorder: of this process.
        scenario: the name under which things are noted.
        index: its number among all of its run.
        chance: its own, so that a run can be repeated.
        session: that is open, if one is.
        player: who plays out its answers.
    """

    abstract = True
    recorder: ClassVar[Recorder]

    def on_start(self) -> None:
        """Comes."""
        self.scenario = type(self).__name__
        self.index = self.recorder.next_index()
        self.chance = random.Random(f"{self.scenario}.{self.index}")
        assert self.host is not None
        assert self.environment.parsed_options is not None
        to = target_of(self.host, self.environment.parsed_options)
        self.client = Client(to.address, recovery=None, timeout_s=TURN_TIMEOUT_S, **to.options)
        self.session: Session | None = None
        self.player = Player(TOKEN_S)
        self.recorder.num_users += 1

    def on_stop(self) -> None:
        """Leaves, and ends its session."""
        self.recorder.num_users -= 1
        self.recorder.close_later(self.client, self.session)
        self._forget_session()

    @task
    def live(self) -> None:
        """One thing after the other: opens a session, or acts in it."""
        if self.session is None:
            self.arrive()
        else:
            self.act(self.session)

    def arrive(self) -> None:
        """Opens a session."""
        raise NotImplementedError

    def act(self, session: Session) -> None:
        """Does the next thing in it."""
        raise NotImplementedError

    def open(self, prompt: str, **options: Unpack[SessionOptions]) -> bool:
        """Opens a session and appends a prompt; says whether that went well."""
        session = self.client.session(**options)
        sent_s = time.perf_counter()
        try:
            session.append(prompt)
        except MicroturnError as error:
            self.fail("open", error)
            return False
        self.recorder.opened(self.scenario, (time.perf_counter() - sent_s) * 1e3)
        self.has_opened(session)
        return True

    def has_opened(self, session: Session) -> None:
        """The server has answered the first turn of this session."""
        self.session = session
        self.player.end()
        self.recorder.num_sessions += 1
        self.recorder.counted("opened", self.scenario)

    def turn(
        self, session: Session, given: str, due_s: float, deadline_s: float | None, **options: Unpack[TurnOptions]
    ) -> bool:
        """Takes a turn to its end; says whether it ended well.

        Args:
            session: that the turn belongs to.
            given: what is said.
            due_s: by `time.perf_counter`, when it was due.
            deadline_s: seconds from there in which it should have ended.
            options: of the turn.
        """
        sent_s = time.perf_counter()
        try:
            first_token_s, end = self.listen(session.turn(given, **options))
        except MicroturnError as error:
            self.fail("turn", error, had_deadline=deadline_s is not None)
            return False
        answered = Answered(due_s, sent_s, first_token_s, time.perf_counter(), deadline_s, end.status)
        self.recorder.answered(self.scenario, answered)
        return True

    def listen(self, turn: Turn) -> tuple[float | None, TurnEnd]:
        """Plays an answer to its end; returns when its first token came, if one did, and the end.

        Raises:
            MicroturnError: as turns do.
        """
        first_s = last_s = None
        for event in turn:
            if isinstance(event, TurnEnd):
                return first_s, event
            if isinstance(event, Tokens) and event.ids:
                now_s = time.perf_counter()
                first_s = first_s or now_s
                self.hear(now_s, len(event.ids), last_s)
                last_s = now_s
        raise AssertionError("a turn ends with TurnEnd")

    def hear(self, now_s: float, num_tokens: int, last_s: float | None) -> None:
        """Notes tokens of an answer; the ones before them came at `last_s`."""
        scene = self.recorder.record.scenes[self.scenario]
        if last_s is not None:
            scene.times["gap"].add((now_s - last_s) * 1e3)
        starved_s = self.player.arrive(now_s, num_tokens)
        if starved_s:
            scene.counts["underruns"] += 1
            scene.times["stall"].add(starved_s * 1e3)

    def fail(self, kind: str, error: MicroturnError, *, had_deadline: bool = False) -> None:
        """Something failed: drops the session and waits a little."""
        self.recorder.failed(kind, self.scenario, error.code, error, had_deadline=had_deadline)
        self._forget_session()
        gevent.sleep(_PAUSE_AFTER_ERROR_S)

    def close(self, session: Session) -> None:
        """Ends the session in the orderly way."""
        session.close()
        self._forget_session()
        self.recorder.counted("closed", self.scenario)

    def vanish(self) -> None:
        """Drops the session without a word: its stream breaks."""
        self._forget_session()
        self.recorder.counted("vanished", self.scenario)

    def _forget_session(self) -> None:
        if self.session is not None:
            self.session = None
            self.recorder.num_sessions -= 1


class BeatKeeper(Person):
    """Somebody whose turns are due on a beat, whether the ones before are answered or not.

    A turn's latency counts from when it was due, so that one which had to wait for the turn before it is late by that.
    When the person leaves or loses its session, turns that were due and are not answered are late by their waiting.
    """

    abstract = True
    every_s: ClassVar[float] = 0.2
    schedule: Schedule | None = None

    def start_beat(self, settle_s: float) -> None:
        """The first turn is due on this person's next beat after so many seconds."""
        self.schedule = Schedule(time.perf_counter() + settle_s, self.every_s, phase(self.index))

    def turn_on_beat(self, session: Session, given: str, **options: Unpack[TurnOptions]) -> bool:
        """Waits for the next turn to be due and takes it; says whether it ended well."""
        assert self.schedule is not None
        gevent.sleep(max(0.0, self.schedule.due_s - time.perf_counter()))
        ended_well = self.turn(session, given, self.schedule.due_s, self.every_s, **options)
        if self.schedule is not None:
            self.schedule.answered()
        return ended_well

    def fail(self, kind: str, error: MicroturnError, *, had_deadline: bool = False) -> None:
        """See `Person.fail`; the turns that nobody takes meanwhile are given up."""
        if self.schedule is not None and had_deadline:
            self.schedule.answered()  # this one has failed, and is counted as that
        super().fail(kind, error, had_deadline=had_deadline)
        self._give_up()

    def on_stop(self) -> None:
        """See `Person.on_stop`."""
        self._give_up()
        super().on_stop()

    def vanish(self) -> None:
        """See `Person.vanish`."""
        self.schedule = None
        super().vanish()

    def close(self, session: Session) -> None:
        """See `Person.close`."""
        self.schedule = None
        super().close(session)

    def _give_up(self) -> None:
        if self.schedule is not None:
            for waited_s in self.schedule.give_up(time.perf_counter()):
                self.recorder.given_up(self.scenario, waited_s, self.every_s)
            self.schedule = None
