"""What memory a load takes, beside what serves the model afterwards: of given models, or of random ones of 1 GB each.

A process of its own converts what has to be converted, another loads and checks the model as a server does, with 8-bit
weights.
Memory is what the system cannot take back from a process (`RssAnon`: pages that are mapped from a file do not count),
sampled every 5 ms, above what it had before. What serves are the weights, a small pool, compiled kernels and buffers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.bench.random_checkpoints import SIZES, write_checkpoints
from load_tests.bench.results import print_table, write_result
from microturn.model.cpu import loading
from microturn.settings import Settings
from microturn.zoo.store import resolve_model


def run_load_memory(models: Sequence[str]) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        models: directories, GGUF files or names of embedded models; random ones if there are none.
    """
    measured: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="load-memory-") as scratch:
        # Conversions are measured, so that none may be in the cache.
        environment = {**os.environ, "MICROTURN_CACHE": str(Path(scratch, "cache"))}
        for model in map(str, models or write_checkpoints(Path(scratch))):
            if not measured:
                _measured(model, environment)  # compiles kernels, which takes memory once for all models
            measured[Path(model).name] = _measured(model, environment)
    print("\nmemory at most while a model is loaded, over that of serving it")
    rows = [
        [
            name,
            f"{of['peak_bytes'] / of['served_bytes']:.2f}",
            *(f"{of[key] / 1e6:,.0f}" for key in ("converting_bytes", "peak_bytes", "served_bytes", "weight_bytes")),
            f"{of['load_s']:.0f}",
        ]
        for name, of in measured.items()
    ]
    print_table(["model", "ratio", "converting, MB", "loading, MB", "serving, MB", "weights, MB", "seconds"], rows)
    print("written:", write_result("load-memory", {"protocol": __doc__, "sizes": SIZES, "models": measured}))


def _measured(model: str, environment: dict[str, str]) -> dict[str, float]:
    converting = _said("convert", model, environment)
    of_load = _said("load", converting["model_dir"], environment)
    return {"converting_bytes": converting["peak_bytes"], **of_load}


def _said(what: str, model: str, environment: dict[str, str]) -> dict[str, Any]:
    print(f"{what} {model}", flush=True)
    command = [sys.executable, "-m", "load_tests.bench.load_memory", what, model]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


class _Watched:
    """The memory of this process from now on."""

    def __init__(self) -> None:
        self._before = _resident_bytes()
        self._most = self._before
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def peak_bytes(self) -> int:
        """At most so far."""
        return self._most - self._before

    @property
    def bytes(self) -> int:
        """Now."""
        return _resident_bytes() - self._before

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, _resident_bytes())
            time.sleep(0.005)


def _resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _measure(what: str, model: str) -> dict[str, object]:
    """One of the two processes: converts a checkpoint, or loads a model."""
    watched = _Watched()
    if what == "convert":
        return {"model_dir": str(resolve_model(model)), "peak_bytes": watched.peak_bytes}
    began_s = time.monotonic()
    loaded = loading.load(Settings(model_dir=model, weights="int8", kv_tokens=512, max_context=512))
    load_s = time.monotonic() - began_s
    return {
        "peak_bytes": watched.peak_bytes,
        "served_bytes": watched.bytes,
        "weight_bytes": loaded.weight_bytes,
        "load_s": load_s,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
