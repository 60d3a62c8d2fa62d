"""The table of metrics in docs/metrics.md and the code say the same."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from microturn.telemetry.families import Family
from microturn.telemetry.metrics import SECONDS, Metrics

TABLE = Path(__file__).parents[3] / "docs" / "metrics.md"
_ROW = re.compile(
    r"\| `(?P<name>microturn_\w+)` \| (?P<type>\w+) \|(?P<unit>[^|]*)\|(?P<labels>[^|]*)\| (?P<meaning>[^|]+) \|"
)


def rows() -> dict[str, re.Match[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `microturn_")]
    # Those of the gateway have a test beside it.
    found = [_ROW.fullmatch(line) for line in lines if not line.startswith("| `microturn_gateway_")]
    assert all(found), "a row that is none"
    return {row["name"]: row for row in found if row}


def labels_in(row: re.Match[str]) -> dict[str, list[str]]:
    """`state` = `running`, `parked`; `kv` = `device`"""
    parts = [re.findall(r"`(\w+)`", part) for part in row["labels"].split(";") if part.strip()]
    return {name: values for name, *values in parts}


def test_the_table_and_the_code_have_the_same_families() -> None:
    assert set(rows()) == {family.name for family in Metrics()} | {"microturn_info"}


def test_types_and_labels_are_those_of_the_table() -> None:
    table = rows()

    def described(family: Family) -> tuple[str, dict[str, list[str]]]:
        return family.kind, {name: list(values) for name, values in family.labels.items()}

    assert {family.name: described(family) for family in Metrics()} == {
        name: (row["type"], labels_in(row)) for name, row in table.items() if name != "microturn_info"
    }


def test_names_are_as_prometheus_wants_them() -> None:
    for family in Metrics():
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
        assert family.meaning.endswith("."), family.name
        assert not {"instance", "job", "le", "session"} & family.labels.keys(), family.name


def test_bounds_are_close_where_it_matters() -> None:
    near = [bound for bound in SECONDS if 0.01 <= bound <= 1]
    assert near[0] == 0.01
    assert near[-1] == 1
    assert all(low < high <= 1.1 * low for low, high in pairwise(near))
    assert {0.1, 0.2, 0.5} <= set(near)
    assert sorted(SECONDS) == SECONDS
