"""Tests of engine: whose a session is, and what nobody may take too much of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microturn.sessions.inputs import TextInput
from microturn.settings import TENANT_HEADER
from support.fake_runner import FakeDriver, expected_tokens
from support.threads import engine_threads, starting_engines

KEY = {"session_key": "a key of ours"}
WRONG_KEYS: list[dict[str, Any]] = [
    {},
    {"session_key": "a key of others"},
    {"session_key": "a key of our"},
    {"session_key": "a key of ours "},
    {"session_key": "\ud800"},
]
DENIED = "PERMISSION_DENIED: the session belongs to somebody else: bring the session_key that its START set"


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=64)


def open_session(driver: FakeDriver, session_id: int | str = 1, **values: Any) -> list[int]:
    """A session, and its history."""
    return [5, *driver.turn(session_id, [5], start=True, max_tokens=3, **values).token_ids]


# ---- the model -----------------------------------------------------------------------------------------------------


def test_a_session_is_opened_on_the_model_that_it_names_alone(driver: FakeDriver) -> None:
    opened = driver.turn(1, [5], start=True, model_fingerprint="the test's")
    assert opened.status.model_fingerprint == "the test's"
    assert driver.turn(1, [6]).status.model_fingerprint is None
    refused = driver.turn(1, [5], start=True, model_fingerprint="another")
    assert refused.code == "FAILED_PRECONDITION"
    assert str(refused.error).endswith(
        "the session is one of another model (fingerprint another, here the test's): open it on a server of that "
        "model, or a new one"
    )
    assert driver.turn(1, [7]).status.context_len == 3 + 3 * 16, "the session that was there lives"


def test_a_model_may_be_named_as_the_server_says_before_it_knows_the_type_of_its_weights(driver: FakeDriver) -> None:
    assert driver.turn(1, [5], start=True, model_fingerprint="the files'").status.model_fingerprint == "the test's"


# ---- ownership -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", WRONG_KEYS)
@pytest.mark.parametrize(
    ("given", "values"),
    [
        ([6], {}),
        ([], {}),
        ([6], {"start": True}),
        ([6], {"start": True, "end": True}),
        ([6], {"start": True, "resume": True}),
        ([], {"end": True}),
        ([6], {"end": True, "on_overlap": "interrupt"}),
        ([], {"on_overlap": "interrupt", "rewind_to": 0}),
        ([97], {"end": True}),
        ([6] * 300, {"end": True}),
    ],
)
def test_nobody_does_anything_to_a_session_without_its_key(
    driver: FakeDriver, given: list[int], values: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """B15: a close that was refused closed all the same. Whatever is asked for, the session does not notice."""
    history = open_session(driver, **KEY)
    answer, _ = driver.post(1, [7], max_tokens=9, **KEY)
    driver.steps(3)
    num_passes = len(driver.runner.batches)
    refused, _ = driver.post(1, given, **values, **wrong)
    driver.steps(1)
    assert refused.error is not None
    assert len(driver.runner.batches) == num_passes + 1
    driver.run()
    assert answer.token_ids == expected_tokens([*history, 7], 9)
    assert driver.turn(1, **KEY).status.context_len == 14


@pytest.mark.parametrize("wrong", WRONG_KEYS)
def test_who_has_no_key_is_told_nothing_of_the_session(driver: FakeDriver, wrong: dict[str, Any]) -> None:
    """The same words whether it is parked, runs or closes; and when it has ended, those for one that never was."""
    told = set()
    open_session(driver, "a-guess", **KEY)
    told.add(str(driver.turn("a-guess", [6], **wrong).error))
    driver.post("a-guess", [7], max_tokens=9, **KEY)
    driver.post("a-guess", end=True, **KEY)
    driver.steps(2)
    refused, _ = driver.post("a-guess", [6], **wrong)
    driver.steps(1)
    told.add(str(refused.error))
    assert told == {DENIED}
    driver.run()
    never = str(driver.turn("a-miss", [6], **wrong).error)
    assert str(driver.turn("a-guess", [6], **wrong).error) == never.replace("a-miss", "a-guess")


def test_a_key_for_a_session_that_has_none_is_wrong_too(driver: FakeDriver) -> None:
    open_session(driver)
    assert str(driver.turn(1, [6], **KEY).error) == DENIED
    assert driver.turn(1).status.context_len == 4


def test_the_owner_does_what_it_wants(driver: FakeDriver) -> None:
    history = open_session(driver, **KEY)
    assert driver.turn(1, [6], max_tokens=2, **KEY).token_ids == expected_tokens([*history, 6], 2)
    assert driver.turn(1, start=True, resume=True, **KEY).status.context_len == 7
    assert driver.turn(1, [8], start=True, max_tokens=2, **KEY).token_ids == expected_tokens([8], 2)
    assert driver.turn(1, end=True, **KEY).status.finish_reason == "closed"


def test_a_session_that_begins_anew_has_the_key_of_its_own_start(driver: FakeDriver) -> None:
    open_session(driver, **KEY)
    driver.turn(1, end=True, **KEY)
    open_session(driver, session_key="another")
    assert driver.turn(1, **KEY).code == "PERMISSION_DENIED"
    assert driver.turn(1, session_key="another").error is None


# ---- tenants -------------------------------------------------------------------------------------------------------


def of(tenant: str) -> dict[str, str]:
    """What a trusted proxy adds to a request of this tenant."""
    return {TENANT_HEADER: tenant}


def test_each_tenant_has_its_own_bound() -> None:
    driver = FakeDriver(max_sessions_per_tenant=2)
    for session_id in (1, 2):
        open_session(driver, session_id, **of("a"))
    refused = driver.turn(3, [5], start=True, **of("a"))
    assert str(refused.error).endswith(
        "RESOURCE_EXHAUSTED: 2 sessions of this tenant are open: close one or try again [retry_after_ms=1000]"
    )
    open_session(driver, 3, **of("b"))
    for session_id in (4, 5, 6):
        open_session(driver, session_id)
    open_session(driver, 1, **of("a"))  # takes the place of the one that it resets
    driver.turn(2, end=True, **of("a"))
    open_session(driver, 7, **of("a"))
    assert driver.turn(8, [5], start=True, **of("a")).code == "RESOURCE_EXHAUSTED"


def test_an_expired_session_counts_no_longer() -> None:
    driver = FakeDriver(max_sessions_per_tenant=1, idle_timeout_s=10)
    open_session(driver, 1, **of("a"))
    driver.clock.now_s += 10
    driver.run()
    open_session(driver, 2, **of("a"))


@pytest.mark.parametrize("other", [{}, of("b")])
def test_a_sessions_turns_come_from_its_tenant(other: dict[str, str]) -> None:
    driver = FakeDriver(max_sessions_per_tenant=2)
    open_session(driver, **of("a"))
    for values in ({}, {"start": True}, {"end": True}):
        assert str(driver.turn(1, [6], **values, **other).error) == DENIED
    assert driver.turn(1, **of("a")).status.context_len == 4


def test_where_no_proxy_is_trusted_nobody_names_a_tenant(driver: FakeDriver) -> None:
    refused = driver.turn(1, [5], start=True, **of("a"))
    assert str(refused.error).endswith(
        "INVALID_ARGUMENT: 'x-microturn-tenant' is not read here: set max_sessions_per_tenant"
    )


def test_what_a_tenant_says_is_shared_within_it_alone() -> None:
    """The salt was empty where a tenant was known, so that `cached_tokens`, and the time of a first turn, told a tenant
    that another had begun with the same words."""
    prompt = [5] * 18
    driver = FakeDriver(share_prefixes=True, max_sessions_per_tenant=9)
    cached = [
        driver.turn(number, prompt, start=True, end=True, max_tokens=1, **tenant).status.usage["cached_tokens"]
        for number, tenant in enumerate((of("a"), of("b"), {}, of("a"), of("b"), {}), start=1)
    ]
    assert cached == [0, 0, 0, 16, 16, 16]


def test_a_tenant_and_a_salt_are_not_taken_for_another_tenant_and_another_salt() -> None:
    prompt = [5] * 18
    driver = FakeDriver(share_prefixes=True, max_sessions_per_tenant=99)
    owners: list[dict[str, Any]] = [
        {"cache_salt": "ab"},
        {"cache_salt": "b", **of("a")},
        {"cache_salt": '["a", "b"]'},
        {"cache_salt": "a", **of("b")},
        {"cache_salt": "null"},
        of("ab"),
        of("null"),
    ]
    for number, owner in enumerate(owners, start=1):
        status = driver.turn(number, prompt, start=True, end=True, max_tokens=1, **owner).status
        assert status.usage["cached_tokens"] == 0, owner
    for number, owner in enumerate(owners, start=50):
        status = driver.turn(number, prompt, start=True, end=True, max_tokens=1, **owner).status
        assert status.usage["cached_tokens"] == 16, owner


# ---- resume --------------------------------------------------------------------------------------------------------


def test_resume_goes_on_with_a_session_that_lives(driver: FakeDriver) -> None:
    history = open_session(driver)
    answer = driver.turn(1, [6], start=True, resume=True, max_tokens=3)
    assert answer.token_ids == expected_tokens([*history, 6], 3)
    assert answer.status.turn == 1


def test_resume_sets_no_default(driver: FakeDriver) -> None:
    open_session(driver)
    driver.turn(1, [6], start=True, resume=True, max_tokens=1, seed=4)
    assert len(driver.turn(1, [7]).token_ids) == 3


def test_resume_of_what_is_not_here_opens_nothing(driver: FakeDriver) -> None:
    """B8: a turn ran with an empty context, without an error. A worker restarted and turns went on."""
    assert driver.turn(1, [6], start=True, resume=True).code == "NOT_FOUND"
    open_session(driver)
    driver.turn(1, end=True)
    assert driver.turn(1, [6], start=True, resume=True).code == "NOT_FOUND"
    open_session(driver, idle_timeout_s=5)
    driver.clock.now_s += 5
    driver.run()
    assert driver.turn(1, [6], start=True, resume=True).code == "EXPIRED"
    assert driver.turn(1, [6]).code == "EXPIRED"


@pytest.mark.parametrize(
    "values", [{"max_context": 64}, {"idle_timeout_s": 9}, {"session_priority": 1}, {"tools": '[{"name": "clock"}]'}]
)
def test_resume_changes_no_option_of_the_session(driver: FakeDriver, values: dict[str, Any]) -> None:
    history = open_session(driver)
    refused = driver.turn(1, [6], start=True, resume=True, **values)
    assert str(refused.error).endswith(
        "INVALID_ARGUMENT: resume goes on with what START has set: send no other option of the session"
    )
    assert driver.turn(1, [6], max_tokens=2).token_ids == expected_tokens([*history, 6], 2)


def test_resume_may_be_the_last_turn(driver: FakeDriver) -> None:
    open_session(driver)
    assert driver.turn(1, start=True, end=True, resume=True).status.finish_reason == "closed"
    assert driver.turn(1).code == "NOT_FOUND"


# ---- what waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[6] * 65, TextInput("x" * 10_000_000)], ids=["ids", "text"])
def test_an_input_that_can_never_fit_does_not_wait_in_memory(driver: FakeDriver, given: Any) -> None:
    """B14: a turn longer than the context limit. Eight of 10 MB each would wait behind every running turn."""
    running, _ = driver.post(1, [5], start=True, max_tokens=9)
    driver.steps(2)
    refused, _ = driver.post(1, given)
    driver.steps(1)
    assert refused.code == "CONTEXT_FULL"
    assert not running.is_done
    assert not driver.engine._sessions.find(1).queued


def test_keep_alives_too_wait_in_a_bounded_queue() -> None:
    driver = FakeDriver(max_queued_turns=3)
    driver.post(1, [5], start=True, max_tokens=9)
    kept = [driver.post(1)[0] for _ in range(10)]
    driver.run()
    assert [recorder.code for recorder in kept] == [None] * 3 + ["RESOURCE_EXHAUSTED"] * 7


def test_a_full_queue_refuses_end_and_closes_all_the_same() -> None:
    driver = FakeDriver(max_queued_turns=1)
    running, _ = driver.post(1, [5], start=True, max_tokens=9)
    waiting, _ = driver.post(1, [6], max_tokens=2)
    closing, _ = driver.post(1, end=True)
    driver.run()
    assert closing.code == "RESOURCE_EXHAUSTED"
    assert (len(running.token_ids), len(waiting.token_ids)) == (9, 2)
    assert driver.turn(1).code == "NOT_FOUND"


def test_an_interrupt_finds_a_full_queue_no_obstacle() -> None:
    driver = FakeDriver(max_queued_turns=1)
    running, _ = driver.post(1, [5], start=True, max_tokens=9)
    driver.steps(2)
    driver.post(1, [6], max_tokens=2)
    new = driver.turn(1, [7], max_tokens=2, on_overlap="interrupt")
    assert new.token_ids == expected_tokens([5, *running.token_ids, 6, 7], 2)


# ---- what costs nothing --------------------------------------------------------------------------------------------


def test_a_thousand_parked_sessions_cost_less_than_two_hundredths_of_a_core() -> None:
    """An engine that looks at its sessions all the time is busy with nothing: this one sleeps until one is due."""
    with starting_engines() as start:
        driver = start(max_sessions=1000, num_pages=1024, max_queued_turns=1)
        answers = [driver.ask(n, [n % 97], start=True, max_tokens=0, idle_timeout_s=60 + n) for n in range(1000)]
        assert all(answer.wait().error is None for answer in answers)
        (thread,) = engine_threads()
        assert thread.ident is not None
        cpu_clock = time.pthread_getcpuclockid(thread.ident)
        begun_s, begun_cpu_s = time.monotonic(), time.clock_gettime(cpu_clock)
        time.sleep(2)
        share = (time.clock_gettime(cpu_clock) - begun_cpu_s) / (time.monotonic() - begun_s)
        assert driver.ask(999, [5], max_tokens=1).wait().error is None
    assert share < 0.02


def test_sessions_that_expire_one_after_another_wake_the_engine_twice_each() -> None:
    with starting_engines() as start:
        driver = start(max_sessions=200, num_pages=256)
        answers = [driver.ask(n, [5, 6], start=True, max_tokens=0, idle_timeout_s=0.5 + n / 200) for n in range(200)]
        assert all(answer.wait().error is None for answer in answers)
        reap, num_wakings = driver.engine._reap, 0

        def counting_reap() -> None:
            nonlocal num_wakings
            num_wakings += 1
            reap()

        driver.engine._reap = counting_reap
        until_s = time.monotonic() + 10
        while driver.pool.num_free < 256 and time.monotonic() < until_s:
            time.sleep(0.05)
    assert driver.pool.num_free == 256
    # Twice each: when its START would have expired, and when its turn's end did. A few more end the last turns.
    assert num_wakings <= 2 * 200 + 10


@pytest.mark.parametrize("session_id", [2**64 - 5, 2**63])
def test_an_integer_that_is_no_session_id_is_refused(session_id: int) -> None:
    """-5 reaches the model as 2**64 - 5, and was a session like any other."""
    driver = FakeDriver()
    assert driver.turn(session_id, [5], start=True).code == "INVALID_ARGUMENT"
    assert driver.turn(2**63 - 1, [5], start=True).code is None
