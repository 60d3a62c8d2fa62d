"""What an operator sees of a real server: `/metrics`, the log, and spans at a collector."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from microturn.telemetry.metrics import Metrics
from microturn_client import Client, TurnEnd
from support.collector import Collector, running_collector
from support.pipelined import PipelinedStream
from support.raw import RawStream, ids, turn_request
from support.scrape import Page, scrape, scrape_until
from support.served import Served, servers_of
from support.tiny_model_dir import write_tiny_model

MODEL_NAME = "tiny"
SECRET = "my password is swordfish"
GENERATE = {"max_tokens": 3, "ignore_eos": True}
# Sessions that end by their idle time, behind all others.
LAST = ("silent", "talking")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Served]:
    """A tiny model with a pool for a few sessions, host memory behind it, and a collector."""
    settings = {"kv_tokens": 3008, "max_context": 3000, "host_tier_bytes": 1 << 30, "otlp_endpoint": collector.endpoint}
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / MODEL_NAME)
    with (
        pytest.MonkeyPatch.context() as variables,
        servers_of(model, partial(tmp_path_factory.mktemp, "run"), **settings) as start,
    ):
        variables.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        served = start()
        served.wait_until_ready(120)
        yield served


def living(page: Page) -> float:
    return page.sum("microturn_sessions")


def ended(page: Page, *reasons: str) -> float:
    return sum(page.sum("microturn_sessions_ended_total", reason=reason) for reason in reasons)


def settled(served: Served, condition: Callable[[Page], bool]) -> Page:
    """A page of which a condition is true, with all else of the same moment.

    An update is many messages, and a page may be read in the middle of them: the next heartbeat ends it.
    """
    beat = scrape_until(served.metrics_url, condition).sum("microturn_heartbeat_timestamp_seconds")
    return scrape_until(served.metrics_url, lambda page: page.sum("microturn_heartbeat_timestamp_seconds") > beat)


def test_the_page_has_all_metrics_from_the_start(served: Served) -> None:
    page = scrape_until(served.metrics_url, lambda page: "microturn_info" in page.names())
    expected = {name for family in Metrics() for name, _ in family.samples()} | {"microturn_info"}
    assert {name for name in page.names() if name.startswith("microturn_")} == expected
    labels = [labels for name in expected for labels in page.labels(name)]
    assert {has["model"] for has in labels} == {"streaming_llm"}
    assert not any("instance" in has for has in labels)
    (info,) = page.labels("microturn_info")
    assert (info["model_name"], info["protocol_version"]) == (MODEL_NAME, "1")
    assert abs(page.sum("microturn_heartbeat_timestamp_seconds") - time.time()) < 60
    assert page.sum("microturn_pages") == page.sum("microturn_pages", use="free") > 0


def test_counters_add_up_after_sessions_of_all_kinds(served: Served) -> None:
    """Opened, closed, replaced, forked, rewound, interrupted, refused, vanished: whatever happens is counted once."""
    before = scrape(served.metrics_url)
    statuses = churn(served.address)

    def is_quiet(page: Page) -> bool:
        return living(page) == 0 and ended(page, "expired") == ended(before, "expired") + 2

    page = settled(served, is_quiet)
    assert page.sum("microturn_sessions_opened_total") == ended(
        page, "closed", "replaced", "moved", "expired", "stopped", "failed"
    )
    assert page.sum("microturn_sessions_opened_total", origin="fork") == 1
    assert ended(page, "replaced") == 1
    assert ended(page, "moved", "stopped", "failed") == 0

    assert page.sum("microturn_pages", use="running") == page.sum("microturn_pages", use="parked") == 0
    assert page.sum("microturn_kv_bytes", tier="host") == 0
    in_use = page.sum("microturn_pages") - page.sum("microturn_pages", use="free")
    assert in_use == page.sum("microturn_pages", use="prefix"), "only what is kept for sessions to come"

    for reason in ("length", "append", "interrupted"):
        num_told = sum(status["finish_reason"] == reason for status in statuses)
        assert page.sum("microturn_turns_total", finish_reason=reason) == num_told > 0, reason
    for code in ("CONTEXT_FULL", "INVALID_ARGUMENT"):
        assert page.sum("microturn_turn_errors_total", code=code) == 1, code
    for kind in ("input", "output", "computed", "cached"):
        num_told = sum(status["usage"][f"{kind}_tokens"] for status in statuses)
        assert page.sum("microturn_turn_tokens_total", kind=kind) == num_told
    assert page.sum("microturn_rewinds_total") == 1
    assert page.sum("microturn_rewound_tokens_total") == 2
    assert page.sum("microturn_prefix_tokens_total", result="hit") >= 16
    assert page.sum("microturn_turn_deadlines_total", outcome="met") == 1
    assert page.sum("microturn_kv_evictions_total", to="host") > 0
    assert page.sum("microturn_kv_restores_total", source="host") > 0
    check_times(page, statuses)


def check_times(page: Page, statuses: list[dict[str, Any]]) -> None:
    """The histograms hold the times that clients were told."""
    timed = [status for status in statuses if status["usage"]["input_tokens"] or status["usage"]["output_tokens"]]
    totals_s = sorted(status["timing_ms"]["total"] / 1e3 for status in timed)
    assert page.sum("microturn_turn_seconds_count") == len(timed)
    assert page.sum("microturn_turn_seconds_sum") == pytest.approx(sum(totals_s))
    assert page.sum("microturn_turn_phase_seconds_count", phase="queue") == len(timed)
    for phase in ("queue", "prefill", "decode"):
        told_s = sum(status["timing_ms"][phase] for status in timed) / 1e3
        assert page.sum("microturn_turn_phase_seconds_sum", phase=phase) == pytest.approx(told_s, abs=0.01), phase
    for bound, number in page.buckets("microturn_turn_seconds"):
        assert number == sum(total_s <= bound for total_s in totals_s), bound
    num_passes = page.sum("microturn_step_seconds_count")
    assert num_passes == page.sum("microturn_step_rows_count") == page.sum("microturn_step_tokens_count") > 0
    num_computed = sum(status["usage"]["computed_tokens"] for status in statuses)
    assert page.sum("microturn_step_tokens_sum") >= num_computed, "those of turns that were undone besides"


def churn(address: str) -> list[dict[str, Any]]:
    """Sessions of all kinds come and go.

    Returns:
        every status that was told.
    """
    statuses: list[dict[str, Any]] = []
    prompt = range(40)

    def say(name: str, *given: int, **how: Any) -> dict[str, Any]:
        answer = stream.send(turn(name, *given, **how)).wait()
        assert answer.error is None, answer.error
        assert answer.status is not None
        statuses.append(answer.status)
        return answer.status

    with PipelinedStream(address) as stream:
        # Eight sessions of more than five hundred tokens, of which the pool holds five.
        for number in range(8):
            say(f"s{number}", *prompt, start=True, **GENERATE)
        for number in range(8):
            say(f"s{number}", *(5 * [*range(60, 160)]), max_tokens=0)
        for number in range(8):
            say(f"s{number}", 7, deadline_ms=60_000.0 if number == 0 else 0.0, **GENERATE)
        say("branch", 8, start=True, fork_of="s1", **GENERATE)
        context_len = say("s2", 9, max_tokens=0)["context_len"]
        say("s2", 9, rewind_to=context_len - 2, max_tokens=0)
        said = stream.send(turn("s3", text=SECRET, start=True, max_tokens=0)).wait()
        statuses.append(said.status or {})
        assert stream.send(turn("s4", 7, max_tokens=3000)).wait().code == "CONTEXT_FULL"
        assert stream.send(turn("s4", 7, max_token=3)).wait().code == "INVALID_ARGUMENT"
        answered = stream.send(turn("s5", 7, max_tokens=2000, ignore_eos=True))
        assert answered.has_begun.wait(60)
        say("s5", 8, on_overlap="interrupt", max_tokens=0)
        statuses.append(answered.wait().status or {})
        for name in (*(f"s{number}" for number in range(8)), "branch"):
            say(name, end=True)

    # Two vanish without a word: one that is silent, and one in the middle of a turn.
    with PipelinedStream(address) as stream:
        silent, talker = LAST
        say(silent, 7, start=True, idle_timeout_s=1.0, max_tokens=0)
        talking = stream.send(turn(talker, 7, start=True, idle_timeout_s=1.0, max_tokens=2990, ignore_eos=True))
        assert talking.has_begun.wait(60)
    return statuses


def turn(name: str, *given: int, text: str = "", start: bool = False, end: bool = False, **options: Any) -> Any:
    inputs = {"text_input": text.encode()} if text else {"input_ids": ids(*given)}
    return turn_request(name, start=start, end=end, options=options, **inputs)


def logged_of_sessions(served: Served) -> dict[str, list[str]]:
    """What the log says so far, by session."""
    events: dict[str, list[str]] = {}
    for line in [json.loads(line) for line in list(served.said) if line.startswith("{")]:
        assert {"time", "level", "logger", "event"} <= line.keys()
        if line["logger"] == "microturn.sessions":
            events.setdefault(line["session"], []).append(line["event"])
    return events


def test_every_session_leaves_its_lines_and_no_word_of_what_was_said(served: Served) -> None:
    deadline_s = time.monotonic() + 60
    events = logged_of_sessions(served)
    while not all("session expired" in events[name] for name in LAST):
        assert time.monotonic() < deadline_s, events
        time.sleep(0.1)
        events = logged_of_sessions(served)
    assert events["s0"] == events["branch"] == ["session opened", "session closed"]
    assert events["s3"] == ["session opened", "session replaced", "session opened", "session closed"]
    assert events[LAST[0]] == events[LAST[1]] == ["session opened", "session expired"]
    assert not any(name.startswith("health-") for name in events), "the supervisor's turns are no news"
    assert not any("swordfish" in line for line in served.said)


def test_a_turn_joins_the_trace_of_its_client(served: Served, collector: Collector) -> None:
    trace_id, client_span_id = secrets.token_hex(16), secrets.token_hex(8)
    begun_ns = time.time_ns()
    with Client(served.address) as client, client.session() as session:
        session.append("Nobody traces this.")
        session.append("Nor this.", traceparent=f"00-{secrets.token_hex(16)}-{client_span_id}-00")
        events = list(
            session.turn(" Hello", max_tokens=4, ignore_eos=True, traceparent=f"00-{trace_id}-{client_span_id}-01")
        )
        ended_ns = time.time_ns()
        session_id = session.id
    spans = {span.name: span for span in collector.wait_for(5)}
    assert set(spans) == {"turn", "queue", "prefill", "decode", "send"}
    assert {span.trace_id for span in spans.values()} == {trace_id}
    whole = spans.pop("turn")
    assert whole.parent_id == client_span_id
    assert {span.parent_id for span in spans.values()} == {whole.span_id}
    assert begun_ns - 10**9 < whole.begun_ns < whole.ended_ns < ended_ns + 10**9
    end = events[-1]
    assert isinstance(end, TurnEnd)
    assert whole.attributes["microturn.session"] == str(session_id)
    assert whole.attributes["microturn.finish_reason"] == "length"
    assert whole.attributes["microturn.output_tokens"] == 4
    assert whole.resource["service.name"] == "microturn"
    assert whole.resource["microturn.model_name"] == MODEL_NAME
    in_order = [spans[name] for name in ("queue", "prefill", "decode", "send")]
    assert whole.begun_ns == in_order[0].begun_ns
    assert whole.ended_ns == in_order[-1].ended_ns
    assert all(abs(one.ended_ns - next_one.begun_ns) < 10_000 for one, next_one in pairwise(in_order))
    decode_ms = (spans["decode"].ended_ns - spans["decode"].begun_ns) / 1e6
    assert decode_ms == pytest.approx(end.status.timing_ms.decode, abs=0.01)


def test_a_collector_gets_the_numbers_of_the_page(served: Served, collector: Collector) -> None:
    """Histograms were counters there, and no value led to a trace."""
    name = "microturn_turn_first_token_seconds"
    before = scrape(served.metrics_url).sum(f"{name}_count")
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    with Client(served.address) as client, client.session() as session:
        for _ in session.turn([5], traceparent=f"00-{trace_id}-{span_id}-01", **GENERATE):
            pass
    page = settled(served, lambda page: page.sum(f"{name}_count") > before)

    def point(metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
        (found,) = metrics[name]["histogram"]["dataPoints"]
        return found

    collector.wait_for_metrics(lambda metrics: int(point(metrics)["count"]) == page.sum(f"{name}_count"))
    assert point(collector.metrics)["sum"] == pytest.approx(page.sum(f"{name}_sum"))
    assert (trace_id, "gen_ai.server.time_to_first_token") in collector.exemplars


def test_a_dead_model_process_shows_and_the_next_one_counts_from_zero(served: Served) -> None:
    """Triton goes on showing the last figures of a model process that has died: its heartbeat tells."""
    with RawStream(served.address) as stream:
        assert stream.ask("lost", start=True, input_ids=ids(5, 6)).error is None
    scrape_until(served.metrics_url, lambda page: living(page) > 0)
    died_s = time.time()
    served.model_process().kill()
    served.wait_for_line("ready in ", 120)
    page = scrape_until(
        served.metrics_url,
        lambda page: "microturn_info" in page.names() and page.sum("microturn_heartbeat_timestamp_seconds") > died_s,
    )
    assert living(page) == 0
    assert page.sum("microturn_sessions_opened_total") == page.sum("microturn_sessions_ended_total")
    assert page.sum("microturn_turn_seconds_count") == 0
