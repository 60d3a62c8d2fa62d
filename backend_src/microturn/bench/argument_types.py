"""Argument types for argparse: numbers, with their error messages."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, not '{text}'")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    if (number := _finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"a number above 0, not '{text}'")
    return number


def not_negative(text: str) -> float:
    """A number from 0 on."""
    if (number := _finite(text)) < 0:
        raise argparse.ArgumentTypeError(f"a number from 0 on, not '{text}'")
    return number


def share(text: str) -> float:
    """A share above 0 and at most 1."""
    if not 0 < (number := _finite(text)) <= 1:
        raise argparse.ArgumentTypeError(f"a share above 0 and at most 1, not '{text}'")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"a number, not '{text}'")
    return number
