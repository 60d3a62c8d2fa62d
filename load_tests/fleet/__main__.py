"""The command line of `make fleet`."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from load_tests.bench.results import RESULTS_DIR, write_result
from load_tests.fleet import limits, simulation
from load_tests.fleet.fleet import Fleet, losses_of
from load_tests.fleet.limits_report import draw_limits, limits_as_json, print_limits
from load_tests.fleet.report import as_json, draw, print_fleet
from load_tests.fleet.simulation import simulate

# In which nothing breaks that grows with a fleet, and a whole number of ten thousand sessions: docs/scale.md.
_CELL_REPLICAS = 80


def main() -> None:
    """Simulates fleets of several sizes, without cells and with them; prints tables, writes JSON and pictures."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.fleet", description=simulation.__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="(%(default)s)")
    assumed = [field for field in fields(Fleet) if field.name != "sessions"]
    for field in assumed:
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help="(%(default)s)")
    parser.add_argument("--name", default="fleet", help="of the files that are written (%(default)s)")
    parser.set_defaults(cell_replicas=_CELL_REPLICAS)
    given = vars(parser.parse_args())
    base = Fleet(**{field.name: given[field.name] for field in assumed})
    results, fleets = [], []
    for sessions in given["sessions"]:
        whole = replace(base, sessions=sessions, cell_replicas=0)
        in_cells = replace(base, sessions=sessions)
        fleets = [whole] if len(in_cells.cells) == 1 else [whole, in_cells]
        drawn = []
        for fleet in fleets:
            courses = {way: simulate(fleet, losses_of(fleet), way) for way in ("tokens", "volume")}
            results.append({**as_json(fleet, courses), "limits": limits_as_json(fleet)})
            print_fleet(fleet, courses)
            drawn.append((fleet, courses))
    wholes = [replace(base, sessions=sessions, cell_replicas=0) for sessions in given["sessions"]]
    print_limits(wholes, base)
    protocol = {"protocol": simulation.__doc__, "limits": limits.__doc__}
    print("\nwritten:", write_result(given["name"], {**protocol, "fleets": results}))
    picture, of_limits = (RESULTS_DIR / f"{given['name']}{what}.png" for what in ("", "-limits"))
    draw(picture, drawn)
    draw_limits(of_limits, wholes, base)
    print("drawn:  ", picture, of_limits)


if __name__ == "__main__":
    main()
