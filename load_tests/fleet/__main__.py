"""The command line of `make fleet`."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from load_tests.bench.results import RESULTS_DIR, write_result
from load_tests.fleet import simulation
from load_tests.fleet.report import as_json, draw, print_fleet
from load_tests.fleet.simulation import Fleet, losses_of, simulate


def main() -> None:
    """Simulates fleets of several sizes, restored both ways; prints tables, and writes a JSON file and a picture."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.fleet", description=simulation.__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="(%(default)s)")
    assumed = [field for field in fields(Fleet) if field.name != "sessions"]
    for field in assumed:
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help="(%(default)s)")
    parser.add_argument("--name", default="fleet", help="of the files that are written (%(default)s)")
    given = vars(parser.parse_args())
    base = Fleet(**{field.name: given[field.name] for field in assumed})
    results = []
    for sessions in given["sessions"]:
        fleet = replace(base, sessions=sessions)
        courses = {way: simulate(fleet, losses_of(fleet), way) for way in ("tokens", "volume")}
        results.append(as_json(fleet, courses))
        print_fleet(fleet, courses)
    print("\nwritten:", write_result(given["name"], {"protocol": simulation.__doc__, "fleets": results}))
    picture = RESULTS_DIR / f"{given['name']}.png"
    draw(picture, fleet, courses)
    print("drawn:  ", picture)


if __name__ == "__main__":
    main()
