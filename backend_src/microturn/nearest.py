"""Finds the known name that a user most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: its nearest known neighbour, or all known names."""
    names = sorted(known)
    # What is much longer than any name is none of them, and comparing it would take long.
    nearest = difflib.get_close_matches(unknown[:100], names, n=1, cutoff=0.5)
    return f"did you mean '{nearest[0]}'?" if nearest else f"known are: {', '.join(names)}"
