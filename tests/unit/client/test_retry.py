import pytest

from microturn_client import (
    ConnectionLost,
    ContextFull,
    DeadlineExceeded,
    Expired,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    ModelChanged,
    NotFound,
    PermissionDenied,
    ProtocolError,
    Recovery,
    ResourceExhausted,
    SessionClosed,
    TurnTimeout,
    Unavailable,
)
from microturn_client import _errors as errors
from microturn_client._retry import Backoff, Patience, Remedy, remedy_for

RULES = {
    InvalidArgument: (Remedy.TELL, Remedy.TELL),
    NotFound: (Remedy.RESUME, Remedy.REOPEN),
    Expired: (Remedy.RESUME, Remedy.REOPEN),
    ContextFull: (Remedy.TELL, Remedy.TELL),
    ResourceExhausted: (Remedy.TELL, Remedy.RESUME),
    FailedPrecondition: (Remedy.TELL, Remedy.REOPEN),
    SessionClosed: (Remedy.TELL, Remedy.REOPEN),
    ModelChanged: (Remedy.TELL, Remedy.REOPEN),
    PermissionDenied: (Remedy.TELL, Remedy.TELL),
    DeadlineExceeded: (Remedy.TELL, Remedy.TELL),
    TurnTimeout: (Remedy.TELL, Remedy.TELL),
    Unavailable: (Remedy.RESUME, Remedy.RESUME),
    ConnectionLost: (Remedy.RESUME, Remedy.RESUME),
    InternalError: (Remedy.RESUME, Remedy.RESUME),
    ProtocolError: (Remedy.RESUME, Remedy.RESUME),
}


def test_the_rule_knows_every_error():
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MicroturnError)
    }
    assert set(RULES) == kinds - {errors.MicroturnError}


@pytest.mark.parametrize(("kind", "remedies"), RULES.items())
def test_what_is_done_about_an_error(kind, remedies):
    assert (remedy_for(kind("x"), is_resuming=False), remedy_for(kind("x"), is_resuming=True)) == remedies


def test_the_servers_fault_is_tried_again_once():
    assert remedy_for(InternalError("x"), is_resuming=False, num_faults=1) is Remedy.TELL


def test_a_turn_that_is_refused_for_its_position_is_no_loss():
    refused = FailedPrecondition("behind the end", {"position": 5})
    assert remedy_for(refused, is_resuming=True) is Remedy.TELL


def new_backoff(now, uniform, **settings):
    return Backoff(Recovery(**settings), lambda: now[0], lambda: uniform)


@pytest.mark.parametrize(("uniform", "share"), [(0.0, 0.5), (0.999999, 1.0)])
def test_delays_double_up_to_a_bound_and_are_random_by_half(uniform, share):
    backoff = new_backoff([0.0], uniform, first_delay_s=0.1, max_delay_s=1.0)
    delays = [backoff.next_attempt_at(None) for _ in range(6)]
    assert delays == pytest.approx([share * delay for delay in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)], rel=1e-5)


def test_the_server_may_ask_for_more_time():
    assert new_backoff([0.0], 0.0).next_attempt_at(700) == 0.7


def test_a_route_is_tried_at_once_and_only_once():
    """Two servers that name each other would be asked without a pause."""
    backoff = new_backoff([5.0], 0.0)
    assert [backoff.next_attempt_at(None, route) for route in ("here", "there")] == [5.0, 5.0]
    assert all(backoff.next_attempt_at(None, route) > 5.0 for route in ("here", "there", "here"))
    backoff.succeeded()
    assert backoff.next_attempt_at(None, "there") == 5.0


def test_patience_counts_from_the_first_failure_and_an_answer_renews_it():
    now = [10.0]
    backoff = new_backoff(now, 0.0)
    assert not backoff.is_exhausted(5.0)
    backoff.next_attempt_at(None)
    now[0] = 14.9
    backoff.next_attempt_at(None)
    assert not backoff.is_exhausted(5.0)
    now[0] = 15.0
    assert backoff.is_exhausted(5.0)
    backoff.succeeded()
    assert not backoff.is_exhausted(5.0)


@pytest.mark.parametrize("uniform", [0.0, 0.999999])
def test_silence_is_borne_twice_as_long_each_time_and_an_answer_renews_it(uniform):
    patience = Patience(Recovery(ask_again_after_s=4.0), lambda: uniform)
    waits = []
    for _ in range(4):
        waits.append(patience.seconds)
        patience.was_in_vain()
    first_s = 4.0 + 2.0 * uniform
    assert waits == pytest.approx([first_s, 2 * first_s, 4 * first_s, 8 * first_s])
    patience.renew()
    assert patience.seconds == pytest.approx(first_s)
