"""Runs sections for one shape, and writes what each has found as soon as it has."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from load_tests.bench.gpu.card import Card
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.sections import SECTIONS
from load_tests.bench.gpu.subject import Subject, ready_subject, release
from load_tests.bench.results import write_result
from microturn.bench.about import about
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings

# What every engine here has; the rest is as a server would have it. Attention through torch would take hours.
SETTINGS = Settings(
    attention="flashinfer",
    max_sessions=4096,
    max_batch_tokens=1024,
    max_queued_turns=16,
    share_prefixes=False,
    idle_timeout_s=MAX_IDLE_TIMEOUT_S,
)

Found = dict[str, dict[str, Any]]
Keep = Callable[[str, dict[str, Any]], None]


def run_shape(
    name: str,
    config: Mapping[str, Any],
    sections: Sequence[str],
    device: torch.device,
    card: Card,
    results_dir: Path,
    *,
    settings: Settings = SETTINGS,
    extent: Extent | None = None,
) -> Found:
    """Measures; a section that fails is told on stderr, and the others go on.

    Args:
        name: of the shape.
        config: what would stand in its config.json.
        sections: their names.
        device: where it runs.
        card: what was measured of it.
        results_dir: where `gpu-<name>.json` is; sections that stand there and are not measured now stay.
        settings: of every engine.
        extent: how much is measured; None is what a GPU can do.

    Returns:
        What the file says of its sections; of one that failed its `error`.
    """
    extent = extent or Extent()
    found = read_found(name, results_dir)

    def keep(section: str, result: dict[str, Any]) -> None:
        # A file may be completed later, by other sources.
        told = about()
        found[section] = {**result, "date": told["date"], "git": told["git"]}
        write_result(f"gpu-{name}", {"shape": name, "card": asdict(card), "sections": found}, results_dir)

    chosen = [section for section in SECTIONS if section in sections]
    for of_engine, names in groupby(chosen, key=lambda section: SECTIONS[section].settings):
        _run_sections(names, config, of_engine(settings, extent), device, card, extent, keep)
    return found


def _run_sections(
    names: Iterable[str],
    config: Mapping[str, Any],
    settings: Settings,
    device: torch.device,
    card: Card,
    extent: Extent,
    keep: Keep,
) -> None:
    """Sections of one engine, which is gone afterwards; one that fails leaves the next ones another engine."""
    waiting = list(names)
    while waiting:
        try:
            with ready_subject(config, settings, device, card) as subject:
                _run_until_failure(waiting, subject, extent, keep)
        except Exception as error:
            for name in waiting:
                keep(name, _failure(error))
            return
        del subject
        release(device)


def _run_until_failure(waiting: list[str], subject: Subject, extent: Extent, keep: Keep) -> None:
    """Takes sections off a list, the one that fails too."""
    while waiting:
        name = waiting.pop(0)
        print(f"measuring {name}", file=sys.stderr)
        try:
            result = SECTIONS[name].measure(subject, extent)
        except Exception as error:
            keep(name, _failure(error))
            return
        keep(name, result)


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


def read_found(name: str, results_dir: Path) -> Found:
    """What a file says of the sections of a shape; empty where there is none."""
    path = results_dir / f"gpu-{name}.json"
    if not path.exists():
        return {}
    sections: Found = json.loads(path.read_text())["sections"]
    return sections
