"""What a result must say beside its numbers: machine, versions, the state of the sources, the date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("microturn", "torch", "transformers", "numba", "nvidia-pytriton")


def about() -> dict[str, object]:
    """A mapping for the result's JSON file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(psutil.virtual_memory().total / 1e9),
            "load_before": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "git": _git_state(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _git_state() -> str:
    """Of the sources that run, where they are a checkout."""
    sources = Path(__file__).parent
    described = subprocess.run(
        ["git", "-C", str(sources), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "not a checkout"
