"""Our part of a Locust run: options, one record of all workers, and at the end the report and the exit code.

Each worker sends what it has seen with Locust's own reports, the last one after its people have left. A run whose
workers do not all send that last report has failed, and so has one in which a scenario itself broke.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from pathlib import Path
from typing import Any

import gevent
from locust import stats
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.event import Events
from locust.rpc import Message
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import calculate_response_time_percentile
from tqdm import tqdm

from load_tests.load.agreement import compare
from load_tests.load.person import Person
from load_tests.load.plans import MIX
from load_tests.load.record import Record
from load_tests.load.recorder import Recorder
from load_tests.load.report import mix_line, progress_line, report
from load_tests.load.server_metrics import Buckets, counts_between, scrape
from load_tests.load.shapes import SHAPES
from load_tests.load.slow_reader import SlowReader
from load_tests.load.target import add_target_options
from load_tests.load.thresholds import Thresholds

# The server gives its figures about once a second, one after the other; after the second beat of its heart all are new.
_HEARTBEAT = "microturn_heartbeat_timestamp_seconds"
_NUM_HEARTBEATS, _HEARTBEATS_S = 2, 20.0
# Messages between the master and its workers.
_STOP, _LAST_REPORT = "microturn_stop", "microturn_last_report"
_LAST_REPORT_S = 10.0
_NEVER_S = 1_000_000


def install(events: Events) -> None:
    """Adds our part to every run of this Locust process."""
    events.init_command_line_parser.add_listener(_add_options)
    events.init.add_listener(_begin_process)


def _add_options(parser: LocustArgumentParser) -> None:
    ours = parser.add_argument_group("Microturn", "what is reported and what must be reached")
    limits = Thresholds()
    ours.add_argument("--report", default="", help="JSON file to write at the end")
    ours.add_argument("--metrics-url", default="", help="the server's metrics, http://HOST:8002/metrics")
    ours.add_argument("--min-on-time", type=float, default=limits.min_on_time, help="share of turns on time")
    ours.add_argument("--max-errors", type=float, default=limits.max_errors, help="share of requests that may fail")
    ours.add_argument("--max-p99-ms", type=float, default=limits.max_p99_ms, help="of turns; 0 for any")
    ours.add_argument("--shape", choices=sorted(SHAPES), default="ramp", help="how shapefile.py lets users come and go")
    add_target_options(parser)


def _begin_process(environment: Environment, **_: Any) -> None:
    """A process of a run begins: a worker, the master, or the only one."""
    runner = environment.runner
    if {people.__name__ for people in environment.user_classes} > set(MIX):  # all that the file has: nobody was named
        environment.user_classes = [people for people in environment.user_classes if people.__name__ in MIX]
        for people in environment.user_classes:
            people.weight = MIX[people.__name__]
    if not isinstance(runner, MasterRunner):
        recorder = Recorder(environment)
        Person.recorder = SlowReader.recorder = recorder
        environment.events.test_start.add_listener(lambda **_: recorder.begin())
        gevent.spawn(recorder.watch)
        inspect.stack()  # Locust does so as a run stops; the first time takes a tenth of a second, and all stand still
        if isinstance(runner, WorkerRunner):
            _Worker(environment, runner, recorder)
        else:
            Judge(environment, recorder)
        # Whoever listens last is told first: sessions are closed when the judge asks the server.
        environment.events.quitting.add_listener(lambda **_: recorder.wait_until_closed(3.0))
    else:
        Judge(environment, None)


class _Worker:
    """Sends what this worker sees to the master."""

    def __init__(self, environment: Environment, runner: WorkerRunner, recorder: Recorder) -> None:
        self._recorder = recorder
        self._runner = runner
        environment.events.report_to_master.add_listener(self._report)
        runner.register_message(_STOP, self._stop, concurrent=True)

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data["microturn"] = self._recorder.record.take()

    def _stop(self, **_: Any) -> None:
        self._runner.stop()
        self._runner.send_message(_LAST_REPORT, self._recorder.record.take())


def _let_csv_end(**_: Any) -> None:
    """Has Locust write its CSV files once more and then no more.

    A master closes them and waits for its workers; whoever writes them every second would wake then, and break.
    """
    interval_s, stats.CSV_STATS_INTERVAL_SEC = stats.CSV_STATS_INTERVAL_SEC, _NEVER_S
    gevent.sleep(interval_s + 0.1)


class Judge:
    """Gathers what all workers saw, or the only process, and judges it when Locust quits.

    Args:
        environment: Locust's.
        recorder: of the only process; None where there are workers.
    """

    def __init__(self, environment: Environment, recorder: Recorder | None) -> None:
        self._environment = environment
        self._recorder = recorder
        self._merged = Record()
        self._num_last_reports = 0
        self._before: dict[str, float] = {}
        assert environment.parsed_options is not None
        self._options: argparse.Namespace = environment.parsed_options
        environment.events.test_start.add_listener(self._begin)
        if isinstance(environment.runner, MasterRunner):
            environment.events.worker_report.add_listener(self._take_in)
            environment.events.test_stopping.add_listener(self._stop_workers)
            environment.runner.register_message(_LAST_REPORT, self._take_in_last)
            environment.events.quitting.add_listener(_let_csv_end)
        environment.events.quitting.add_listener(self._judge)
        if environment.web_ui is not None:
            assert environment.web_ui.app is not None
            environment.web_ui.app.add_url_rule("/microturn", "microturn", self._report_now)
        if self._options.headless:
            gevent.spawn(self._show_progress)

    @property
    def record(self) -> Record:
        """What was seen so far."""
        return self._merged if self._recorder is None else self._recorder.record

    def _begin(self, **_: Any) -> None:
        self._merged = Record()
        self._num_last_reports = 0
        self._before = self._scrape()
        print(mix_line(self._environment.user_classes), flush=True)

    def _take_in(self, data: dict[str, Any], **_: Any) -> None:
        self._merged.merge(Record.from_json(data["microturn"]))

    def _take_in_last(self, msg: Message, **_: Any) -> None:
        self._merged.merge(Record.from_json(msg.data))
        self._num_last_reports += 1

    def _stop_workers(self, **_: Any) -> None:
        """Lets people finish on all workers, and waits for what they saw; Locust itself would not wait long enough."""
        runner = self._environment.runner
        assert isinstance(runner, MasterRunner)
        runner.send_message(_STOP)
        give_up_s = time.monotonic() + self._environment.stop_timeout + _LAST_REPORT_S
        while self._num_last_reports < runner.worker_count and time.monotonic() < give_up_s:
            gevent.sleep(0.05)

    def _judge(self, **_: Any) -> None:
        self._wait_for_metrics()
        written = self._report_now()
        if self._options.report:
            path = Path(self._options.report)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(written, indent=1) + "\n")
        print()
        for line in written["missed"] or ["all thresholds were reached"]:
            print(line, flush=True)
        self._environment.process_exit_code = 0 if written["passed"] else 1

    def _report_now(self) -> dict[str, Any]:
        options, record = self._options, self.record
        thresholds = Thresholds(options.min_on_time, options.max_errors, options.max_p99_ms)
        missed = thresholds.missed(record.total) + self._broken()
        after = self._scrape()
        buckets = Buckets(self._before, after, "microturn_turn_seconds") if after else None
        rows = compare(record.total, self._locust_ms(), buckets)
        return report(record, thresholds, missed, rows, counts_between(self._before, after))

    def _broken(self) -> list[str]:
        """What is wrong with the run itself, whatever the server did."""
        runner = self._environment.runner
        assert runner is not None
        broken = [f"a scenario broke: {failure['msg']}" for failure in runner.exceptions.values()]
        num_silent = self._options.expect_workers - self._num_last_reports if self._recorder is None else 0
        return broken + ([f"{num_silent} workers did not report to the end"] if num_silent > 0 else [])

    def _locust_ms(self) -> tuple[int, float, float]:
        """Number, p50 and p99 of turns as Locust has them."""
        response_times: dict[int, int] = {}
        for (_, kind), entry in self._environment.stats.entries.items():
            if kind == "turn":
                for ms, num in entry.response_times.items():
                    response_times[ms] = response_times.get(ms, 0) + num
        num = sum(response_times.values())
        p50_ms, p99_ms = (calculate_response_time_percentile(response_times, num, share) for share in (0.5, 0.99))
        return num, p50_ms, p99_ms

    def _wait_for_metrics(self) -> None:
        """Until the server has given all its figures once since now, if it gives any."""
        give_up_s = time.monotonic() + _HEARTBEATS_S
        seen: set[float] = set()
        while len(seen) <= _NUM_HEARTBEATS and time.monotonic() < give_up_s:
            beats = [value for key, value in self._scrape().items() if key.startswith(_HEARTBEAT)]
            if not beats:
                return
            seen.update(beats)
            gevent.sleep(0.2)

    def _scrape(self) -> dict[str, float]:
        if not self._options.metrics_url:
            return {}
        try:
            return scrape(self._options.metrics_url)
        except OSError as error:
            print(f"no metrics from the server: {error}", flush=True)
            return {}

    def _show_progress(self) -> None:
        tqdm.monitor_interval = 0
        runner = self._environment.runner
        assert runner is not None
        with tqdm(total=self._options.run_time, unit="s", mininterval=2, maxinterval=30) as progress:
            began_s = time.monotonic()
            while True:
                gevent.sleep(1)
                progress.set_postfix_str(progress_line(self.record, runner.user_count), refresh=False)
                progress.update(round(time.monotonic() - began_s) - progress.n)
