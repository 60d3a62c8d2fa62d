"""The command line: nothing is downloaded, and what is imported is what a bare machine with a GPU has."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from load_tests.bench.gpu.card import measure_card
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.picture import draw_found
from load_tests.bench.gpu.report import print_card, print_found
from load_tests.bench.gpu.run import read_found, run_shape
from load_tests.bench.gpu.sections import SECTIONS
from load_tests.bench.gpu.subject import release
from load_tests.bench.results import RESULTS_DIR
from microturn.planning.known_shapes import NAMED_CONFIGS

_SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
_READ_BYTES, _HOST_BYTES = 4 << 30, 1 << 30


def main() -> int:
    """Measures, writes a JSON file and a picture for each shape, prints a table last.

    Returns:
        The exit code: 1 where a section has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m load_tests.bench.gpu", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(NAMED_CONFIGS), default=_SHAPES, help="(%(default)s)")
    parser.add_argument(
        "--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS), help="(all); none draws what is there"
    )
    parser.add_argument(
        "--extent", nargs="+", default=[], metavar="NAME=VALUE", help="other numbers than usual: rows=8,64"
    )
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, metavar="DIR", help="where files go (%(default)s)")
    arguments = parser.parse_args()
    shapes, sections, results_dir = arguments.shapes, arguments.sections, arguments.results
    try:
        extent = Extent.of(arguments.extent)
    except ValueError as error:
        parser.error(str(error))
    results_dir.mkdir(parents=True, exist_ok=True)
    if sections:
        if not torch.cuda.is_available():
            parser.error("torch finds no GPU")
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
        logging.getLogger("microturn").setLevel(logging.INFO)
        device = torch.device("cuda", 0)
        card = measure_card(device, _READ_BYTES, _HOST_BYTES)
        release(device)
        print_card(card)
        for shape in shapes:
            run_shape(shape, NAMED_CONFIGS[shape], sections, device, card, results_dir, extent=extent)
    has_failed = False
    for shape in shapes:
        found = read_found(shape, results_dir)
        draw_found(shape, found, results_dir / f"gpu-{shape}.png")
        print()
        print_found(shape, {section: found[section] for section in sections or found})
        has_failed = has_failed or any("error" in found[section] for section in sections)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
