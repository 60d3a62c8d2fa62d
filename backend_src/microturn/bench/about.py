"""The context of a benchmark result: machine, versions, state of the sources, date."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("microturn", "torch", "transformers", "numba", "nvidia-pytriton", "flashinfer-python")


def about() -> dict[str, object]:
    """A mapping for the result's JSON file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            **_gpu(),
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


def cpu_model() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpu() -> dict[str, object]:
    """The first GPU that torch sees, if any."""
    import torch

    if not torch.cuda.is_available():
        return {}
    of = torch.cuda.get_device_properties(0)
    return {"gpu": of.name, "gpu_memory_gb": round(of.total_memory / 1e9), "cuda": torch.version.cuda}


def _git_state() -> str:
    """The state of the running sources, if they are a checkout."""
    git = shutil.which("git")
    if git is None:
        return "not known: git is missing"
    described = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "not a checkout"
