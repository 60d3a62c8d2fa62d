"""Readers of options' values: each returns a value of the wire checked, or raises ValueError with what it must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def _is_plain(value: float | str) -> bool:
    """Python reads digits of any script, and underscores between them; a decimal string has neither."""
    return not isinstance(value, str) or (value.isascii() and "_" not in value)


def integer(low: int, high: int) -> Callable[[Any], int]:
    """Integers from `low` to `high`; also as a decimal string."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str) or not _is_plain(value):
            raise ValueError(f"an integer from {low} to {high}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"an integer from {low} to {high}") from None
        if not low <= number <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return number

    return parse


def number(low: float, high: float, *, above_low: bool = False) -> Callable[[Any], float]:
    """Numbers from `low` to `high`, or above `low`; also as a decimal string. NaN is none."""
    expected = f"a number {'above' if above_low else 'from'} {low:g} {'and at most' if above_low else 'to'} {high:g}"

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not _is_plain(value):
            raise ValueError(expected)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        # Written so that NaN fails too.
        if not low <= number <= high or (above_low and number == low):
            raise ValueError(expected)
        return number

    return parse


def boolean(value: Any) -> bool:
    """True or false; also as text."""
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise ValueError("true or false")


def list_of(item_type: type, expected: str, max_items: int, accepts: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Lists of such items, as a list or as JSON."""

    def parse(value: Any) -> tuple[Any, ...]:
        try:
            items = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, a nest of brackets
            raise ValueError(expected) from None
        if not isinstance(items, list) or len(items) > max_items:
            raise ValueError(expected)
        if not all(type(item) is item_type and accepts(item) for item in items):
            raise ValueError(expected)
        return tuple(items)

    return parse


def one_of(*choices: str) -> Callable[[Any], str]:
    """One of some texts."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return str(value)

    return parse


def text(max_len: int) -> Callable[[Any], str]:
    """Texts of 1 to `max_len` characters."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= max_len:
            raise ValueError(f"a string of 1 to {max_len} characters")
        return value

    return parse
