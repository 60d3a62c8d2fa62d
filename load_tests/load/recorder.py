"""Takes down what the people of one process see: in the record, and for Locust's own tables."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import gevent
from gevent.pool import Group
from locust.env import Environment
from locust.runners import LocalRunner, WorkerRunner

from load_tests.load.record import Answered, Record
from microturn_client import Client, Session


@dataclass
class Recorder:
    """The record of a process, and what is there now.

    Attributes:
        environment: Locust's.
        record: since it was last taken.
        num_users: people who are there.
        num_sessions: sessions that they have open.
    """

    environment: Environment
    record: Record = field(default_factory=Record)
    num_users: int = 0
    num_sessions: int = 0
    _num_came: int = 0
    _closing: Group = field(default_factory=Group)

    def next_index(self) -> int:
        """A number for whoever comes, from 0 on and different on all workers."""
        runner, options = self.environment.runner, self.environment.parsed_options
        assert isinstance(runner, LocalRunner | WorkerRunner)
        assert options is not None
        index = int(runner.worker_index) + self._num_came * max(1, int(options.expect_workers))
        self._num_came += 1
        return index

    def begin(self) -> None:
        """A run begins: whoever comes is counted from 0 on."""
        self.record = Record()
        self._num_came = 0

    def answered(self, scenario: str, turn: Answered) -> None:
        """A turn ended well."""
        self.record.answered(scenario, turn, int(time.time()))
        if turn.first_token_s is not None:
            self._tell_locust("ttft", scenario, (turn.first_token_s - turn.due_s) * 1e3)
        self._tell_locust("turn", scenario, turn.latency_ms, num_tokens=turn.status.usage.output_tokens)

    def opened(self, scenario: str, ms: float) -> None:
        """A session was opened by appending its prompt, and that took so long."""
        self.record.opened(scenario, ms)
        self._tell_locust("open", scenario, ms)

    def timed(self, kind: str, scenario: str, ms: float) -> None:
        """Something else took so long."""
        self.record.scenes[scenario].times[kind].add(ms)
        self._tell_locust(kind, scenario, ms)

    def counted(self, what: str, scenario: str) -> None:
        """Something happened."""
        self.record.scenes[scenario].counts[what] += 1

    def given_up(self, scenario: str, waited_s: float, deadline_s: float) -> None:
        """A turn was due and has no answer."""
        self.record.given_up(scenario, waited_s, deadline_s, int(time.time()))
        if waited_s > deadline_s:
            self._tell_locust("turn", scenario, waited_s * 1e3)

    def failed(self, kind: str, scenario: str, code: str, error: Exception, *, had_deadline: bool = False) -> None:
        """A turn or an opening failed."""
        self.record.failed(scenario, code, int(time.time()), had_deadline=had_deadline)
        self._tell_locust(kind, scenario, None, error=error)

    def close_later(self, client: Client, session: Session | None) -> None:
        """Somebody left: their session is ended, and nobody waits for it."""

        def close() -> None:
            if session is not None:
                session.close(2.0)
            client.close(2.0)

        self._closing.spawn(close)

    def wait_until_closed(self, timeout_s: float) -> None:
        """Waits for those who left."""
        self._closing.join(timeout_s)

    def watch(self) -> None:
        """Takes down once a second, on the second, how many are there; never returns."""
        while True:
            now = time.time()
            gevent.sleep(int(now) + 1 - now)
            if self.num_users:
                second = self.record.seconds[round(time.time())]
                second.num_users, second.num_sessions = self.num_users, self.num_sessions

    def _tell_locust(
        self, kind: str, scenario: str, ms: float | None, *, num_tokens: int = 0, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=scenario,
            response_time=ms,
            response_length=num_tokens,
            exception=error,
            context={},
        )
