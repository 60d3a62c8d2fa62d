"""``microturn check`` on the command line. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path

from microturn.errors import MicroturnError
from microturn.serve.errors import ServeError
from microturn.serve.options import read_settings
from microturn.settings import Settings


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``microturn check``."""
    parser.add_argument("model", metavar="MODEL", help="what `microturn serve --model` takes")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of the engine, as with serve"
    )
    parser.add_argument("--json", action="store_true", help="print what was found for programs")


def run_check(arguments: argparse.Namespace) -> int:
    """Loads a model as a server would and prints what it found.

    Returns:
        The exit code: 0 where the model can be served, 1 where it cannot, with the reason on stderr.
    """
    on_disk = served = reason = None
    try:
        settings = Settings.from_strings(read_settings(arguments.set))
        from microturn.planning.on_disk import OnDisk
        from microturn.zoo.store import resolve_model

        directory = resolve_model(arguments.model)
        # A model that was converted lies in a directory of the cache, with another name.
        on_disk = OnDisk.of(Path(arguments.model).expanduser().resolve().name, directory)
        print(f"microturn: loading and checking {directory}, as a server would", file=sys.stderr)
        _silence()
        from microturn.planning.check import check

        served = check(replace(settings, model_dir=str(directory)))
    except (MicroturnError, ServeError) as error:
        reason = str(error.args[0])
    if arguments.json:
        told = {"model": arguments.model, "is_served": served is not None, "reason": reason}
        for part in (on_disk, served):
            told |= {} if part is None else asdict(part)
        print(json.dumps(told, indent=1))
    elif on_disk is not None:
        from microturn.planning.check_lines import lines

        print("\n".join(lines(on_disk, served)))
    if reason is not None:
        print(f"microturn: error: {reason}", file=sys.stderr)
    return int(reason is not None)


def _silence() -> None:
    """Keeps log lines and progress bars of loading off stderr: what they say is in the report."""
    from transformers.utils.logging import disable_progress_bar

    logging.getLogger("microturn").addHandler(logging.NullHandler())
    disable_progress_bar()
