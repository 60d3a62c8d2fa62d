"""What `/metrics` says, as numbers."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

_LINE = re.compile(r"(?P<name>[a-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<number>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Page:
    """A page in Prometheus' text format; a line that is none fails.

    Attributes:
        types: of the families, by name.
    """

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self._numbers: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                self.types[name] = kind
            elif line and not line.startswith("#"):
                parts = _LINE.fullmatch(line)
                assert parts is not None, line
                labels = dict(_LABEL.findall(parts["labels"] or ""))
                self._numbers.append((parts["name"], labels, float(parts["number"])))

    def sum(self, name: str, **labels: str) -> float:
        """Of all numbers of a name that have these labels; there is one at least."""
        numbers = [number for of, has, number in self._numbers if of == name and labels.items() <= has.items()]
        assert numbers, f"no {name}{labels}"
        return sum(numbers)

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each number of a name."""
        return [has for of, has, _ in self._numbers if of == name]

    def __str__(self) -> str:
        """What is not zero, without the buckets."""
        return "\n".join(
            f"{name} {has} {number:g}" for name, has, number in self._numbers if number and not name.endswith("_bucket")
        )

    def names(self) -> set[str]:
        return {name for name, _, _ in self._numbers}

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """The bounds of a histogram, of one series, and how many values there are up to each."""
        found = [
            (float(has["le"]), number)
            for of, has, number in self._numbers
            if of == f"{name}_bucket" and labels.items() <= has.items()
        ]
        return sorted(found)


def scrape(url: str) -> Page:
    with urllib.request.urlopen(url, timeout=10) as response:
        return Page(response.read().decode())


def scrape_until(url: str, condition: Callable[[Page], bool], pause_s: float = 0.2) -> Page:
    """The first page of which a condition is true."""
    deadline_s = time.monotonic() + 60
    while True:
        page = scrape(url)
        if condition(page):
            return page
        assert time.monotonic() < deadline_s, f"the metrics never said so:\n{page}"
        time.sleep(pause_s)
