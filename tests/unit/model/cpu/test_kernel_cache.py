"""Tests of kernel_cache: which changes Numba takes notice of, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONSTANTS = """
SCALE = {scale}
"""

PART = """
import numba
from constants import SCALE

@numba.njit
def part(x):
    return SCALE * x + {number}
"""

KERNEL = """
import numba
from part import part

@numba.njit(cache=True)
def kernel(x):
    return part(x)
"""

PROGRAM = """
from pathlib import Path
from microturn.model.cpu import kernel_cache

kernel_cache._SOURCES = (Path("sources"), Path("constants.py"))
kernel_cache.watch_all_sources()
from kernel import kernel

print(kernel(1), sum(kernel.stats.cache_hits.values()))
"""


def run(directory: Path) -> str:
    sources = directory / "sources"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(directory / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=directory, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_kernel_is_compiled_again_when_what_it_is_made_of_has_changed(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.py").write_text(KERNEL)
    (sources / "part.py").write_text(PART.format(number=1))
    (tmp_path / "constants.py").write_text(CONSTANTS.format(scale=1))
    assert run(tmp_path) == "2 0"
    assert run(tmp_path) == "2 1"
    (sources / "part.py").write_text(PART.format(number=40))
    assert run(tmp_path) == "41 0"
    (tmp_path / "constants.py").write_text(CONSTANTS.format(scale=10))
    assert run(tmp_path) == "50 0"


def test_a_kernel_whose_argument_has_another_class_is_compiled_again(tmp_path: Path) -> None:
    """Numba reads an index, which names the class, before it compares what it was made of."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (tmp_path / "constants.py").write_text("")
    of_class = "from typing import NamedTuple\n\nclass {name}(NamedTuple):\n    x: int\n\nmade = {name}(1)\n"
    (sources / "kernel.py").write_text(
        "import numba\nfrom pair import made\n\n@numba.njit(cache=True)\ndef of_made(made, x):\n"
        "    return made.x + x\n\nclass kernel:\n    stats = property(lambda self: of_made.stats)\n"
        "    def __call__(self, x):\n        return of_made(made, x)\n\nkernel = kernel()\n"
    )
    for name in ("One", "Other"):
        (sources / "pair.py").write_text(of_class.format(name=name))
        assert run(tmp_path) == "2 0"
        assert run(tmp_path) == "2 1"


def test_our_kernels_are_kept_so() -> None:
    program = (
        "from numba import config\n"
        "import microturn.model.cpu.attention_kernels, microturn.model.cpu.int8_kernels\n"
        "print(config.CACHE_LOCATOR_CLASSES)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split(",")[0] == "microturn.model.cpu.kernel_cache.InGivenDirectory"
