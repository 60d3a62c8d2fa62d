"""Tests of errors."""

from __future__ import annotations

import pytest

from microturn import errors
from microturn.errors import FailedPrecondition, MicroturnError, NotFound, ResourceExhausted

CODES = {
    "InvalidArgument": "INVALID_ARGUMENT",
    "NotFound": "NOT_FOUND",
    "Expired": "EXPIRED",
    "ContextFull": "CONTEXT_FULL",
    "ResourceExhausted": "RESOURCE_EXHAUSTED",
    "FailedPrecondition": "FAILED_PRECONDITION",
    "PermissionDenied": "PERMISSION_DENIED",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "Unavailable": "UNAVAILABLE",
    "InternalError": "INTERNAL",
}


def test_the_tree_has_the_codes_of_the_wire_contract_and_no_others() -> None:
    assert {cls.__name__: cls.code for cls in MicroturnError.__subclasses__()} == CODES


def test_every_error_stands_in_the_picture_of_the_tree() -> None:
    assert errors.__doc__ is not None
    for name in CODES:
        assert f"── {name} " in errors.__doc__


@pytest.mark.parametrize("name", CODES)
def test_the_message_begins_with_the_code(name: str) -> None:
    error = getattr(errors, name)("do this")
    assert str(error) == f"{CODES[name]}: do this"
    assert error.details == {}


def test_details_follow_the_sentence_in_brackets() -> None:
    assert str(ResourceExhausted("try again", retry_after_ms=200)) == (
        "RESOURCE_EXHAUSTED: try again [retry_after_ms=200]"
    )
    assert str(FailedPrecondition("a gap", turn=3, position=70)) == "FAILED_PRECONDITION: a gap [turn=3 position=70]"


def test_one_handler_catches_them_all() -> None:
    with pytest.raises(MicroturnError):
        raise NotFound("open one")
