"""Metrics as Prometheus' text."""

from __future__ import annotations

from microturn.hosts.exposition import Exposition
from support.scrape import Page


def test_families_are_shown_with_their_samples() -> None:
    exposition = Exposition()
    make = exposition.family_type()
    turns = make("turns_total", "how many", make.COUNTER)
    of_a, of_b = turns.Metric({"model": "a"}), turns.Metric({"model": "b"})
    sessions = make("sessions", "now", make.GAUGE).Metric({})
    of_a.increment(2)
    of_a.increment(1)
    of_b.set(0.1)
    sessions.set(5)
    page = Page(exposition.text())
    assert page.types == {"turns_total": "counter", "sessions": "gauge"}
    assert (page.sum("turns_total", model="a"), page.sum("turns_total", model="b")) == (3.0, 0.1)
    assert page.sum("sessions") == 5.0


def test_text_is_escaped_so_that_a_line_stays_one() -> None:
    exposition = Exposition()
    make = exposition.family_type()
    make("info", "two\nlines \\", make.GAUGE).Metric({"name": 'a "b"\n\\'})
    assert exposition.text().splitlines() == [
        r"# HELP info two\nlines \\",
        "# TYPE info gauge",
        r'info{name="a \"b\"\n\\"} 0.0',
    ]


def test_families_of_one_exposition_are_not_in_another() -> None:
    one, other = Exposition(), Exposition()
    make = one.family_type()
    make("here", "", make.GAUGE)
    assert other.text() == ""
