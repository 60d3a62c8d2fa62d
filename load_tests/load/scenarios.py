"""The people of the load tests, a class for each thing that people do. `plans.py` says how a run of them is judged."""

from __future__ import annotations

import time

import gevent

from load_tests.load.person import TOKEN_S, BeatKeeper, Person
from load_tests.load.words import words
from microturn_client import MicroturnError, Session, Tokens

# Openings compute long prompts: who keeps a beat lets the others open too before it begins.
_SETTLE_S = 2.0


class Beat(BeatKeeper):
    """Four words in, four tokens out, every 200 ms, behind a prompt of 400 words; in a window of 1,000, so for ever."""

    def arrive(self) -> None:
        """See `Person.arrive`."""
        if self.open(words(self.chance, 400), overflow="window", window_tokens=1000):
            self.start_beat(_SETTLE_S)

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        self.turn_on_beat(session, words(self.chance, 4), max_tokens=4, ignore_eos=True)


class Chat(Person):
    """Types a line, waits for the whole answer, thinks a moment; after eight of these closes, and begins anew."""

    _num_left = 0

    def arrive(self) -> None:
        """See `Person.arrive`."""
        if self.open(words(self.chance, 50)):
            self._num_left = 8

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        if not self._num_left:
            self.close(session)
            return
        self._num_left -= 1
        gevent.sleep(self.chance.uniform(0.3, 1.0))
        self.player.end()
        self.turn(
            session,
            words(self.chance, self.chance.randint(4, 24)),
            time.perf_counter(),
            None,
            max_tokens=24,
            ignore_eos=True,
        )


class Churn(BeatKeeper):
    """Looks in, takes one to five turns on the beat and vanishes without END, half of the time in the middle of a turn.

    Visits are due at random times, a second and a half apart in the mean; who is late because the visit before took so
    long comes at once.
    """

    _next_visit_s = 0.0
    _num_left = 0

    def on_start(self) -> None:
        """See `Person.on_start`."""
        super().on_start()
        self._next_visit_s = time.perf_counter()

    def arrive(self) -> None:
        """See `Person.arrive`."""
        self._next_visit_s += self.chance.expovariate(1 / 1.5)
        gevent.sleep(max(0.0, self._next_visit_s - time.perf_counter()))
        if self.open(words(self.chance, 20), idle_timeout_s=3):
            self._num_left = self.chance.randint(1, 5)
            self.start_beat(0.0)

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        if self._num_left:
            self._num_left -= 1
            self.turn_on_beat(session, words(self.chance, 4), max_tokens=4, ignore_eos=True)
            return
        if self.chance.random() < 0.5:
            try:
                next(session.turn(words(self.chance, 4), max_tokens=64, ignore_eos=True))
            except MicroturnError as error:
                self.fail("turn", error)
                return
        self.vanish()


class BargeIn(Person):
    """Asks for a long answer, hears some of it and talks over the rest, telling how many tokens were heard."""

    def arrive(self) -> None:
        """See `Person.arrive`."""
        self.open(words(self.chance, 50), overflow="window", window_tokens=1000)

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        gevent.sleep(self.chance.uniform(0.3, 1.0))
        try:
            self._talk_over(session, num_heard=self.chance.randint(1, 20))
        except MicroturnError as error:
            self.fail("barge-in", error)
            return
        self.player.end()
        self.turn(session, words(self.chance, 6), time.perf_counter(), None, max_tokens=8, ignore_eos=True)

    def _talk_over(self, session: Session, num_heard: int) -> None:
        self.player.end()
        answer = session.turn(words(self.chance, 8), max_tokens=80, ignore_eos=True)
        heard_at_s = last_s = None
        num_arrived = 0
        while num_arrived < num_heard and isinstance(event := next(answer), Tokens):
            now_s = time.perf_counter()
            heard_at_s = heard_at_s or now_s + num_heard * TOKEN_S
            self.hear(now_s, len(event.ids), last_s)
            num_arrived, last_s = num_arrived + len(event.ids), now_s
        assert heard_at_s is not None
        gevent.sleep(max(0.0, heard_at_s - time.perf_counter()))  # tokens come faster than they are played
        interrupted_s = time.perf_counter()
        session.interrupt(heard_tokens=min(num_heard, num_arrived))
        self.recorder.timed("barge-in", self.scenario, (time.perf_counter() - interrupted_s) * 1e3)
        self.recorder.counted("interrupted", self.scenario)


class LongSession(BeatKeeper):
    """Sixteen words in, eight tokens out, every second, behind 1,000 words; closes at 4,000 tokens and begins anew."""

    every_s = 1.0

    def arrive(self) -> None:
        """See `Person.arrive`."""
        if self.open(words(self.chance, 1000)):
            self.start_beat(_SETTLE_S)

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        if session.context_len > 4000:
            self.close(session)
        else:
            self.turn_on_beat(session, words(self.chance, 16), max_tokens=8, ignore_eos=True)


class Herd(Person):
    """Comes every five seconds, at the same instant as everybody else; opens a session, wants one token, and closes.

    Times count from that instant.
    """

    every_s = 5.0

    def arrive(self) -> None:
        """See `Person.arrive`."""
        wait_s = self.every_s - time.time() % self.every_s
        due_s = time.perf_counter() + wait_s
        gevent.sleep(wait_s)
        session = self.client.session()
        if self.turn(session, words(self.chance, 50), due_s, None, max_tokens=1, ignore_eos=True):
            self.has_opened(session)

    def act(self, session: Session) -> None:
        """See `Person.act`."""
        self.close(session)
