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
from microturn.model.cpu.kernel_cache import kernel as compiled
from part import part

@compiled()
def kernel(x):
    return part(x)
"""

KERNEL_OF_PAIR = """
from microturn.model.cpu.kernel_cache import kernel as compiled
from pair import made

@compiled()
def of_made(made, x):
    return made.x + x

def kernel(x):
    return of_made(made, x)

kernel.stats = of_made.stats
"""

PROGRAM = """
from pathlib import Path
from microturn.model.cpu import kernel_cache

kernel_cache._SOURCES = (Path("sources"), Path("constants.py"))
from kernel import kernel

print(kernel(1), sum(kernel.stats.cache_hits.values()))
"""


def run(directory: Path, cache: Path | None = None) -> str:
    sources = directory / "sources"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache or directory / "cache")}
    # Sources change within a second here and keep their length: Python would not notice that what it compiled is old.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
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
    (sources / "kernel.py").write_text(KERNEL_OF_PAIR)
    for name in ("One", "Other"):
        (sources / "pair.py").write_text(of_class.format(name=name))
        assert run(tmp_path) == "2 0"
        assert run(tmp_path) == "2 1"


def test_another_environment_with_the_same_sources_has_them_compiled(tmp_path: Path) -> None:
    for name in ("one", "other"):
        environment = tmp_path / name
        sources = environment / "sources"
        sources.mkdir(parents=True)
        (sources / "kernel.py").write_text(KERNEL)
        (sources / "part.py").write_text(PART.format(number=1))
        (environment / "constants.py").write_text(CONSTANTS.format(scale=1))
    assert run(tmp_path / "one", tmp_path / "cache") == "2 0"
    assert run(tmp_path / "other", tmp_path / "cache") == "2 1"


def test_old_kernels_make_room_for_new_ones(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (tmp_path / "constants.py").write_text(CONSTANTS.format(scale=1))
    (sources / "kernel.py").write_text(KERNEL)
    somebodys = tmp_path / "cache" / "somebodys"
    somebodys.mkdir(parents=True)
    for number in range(8):
        (sources / "part.py").write_text(PART.format(number=number))
        assert run(tmp_path) == f"{1 + number} 0"
    assert len(list((tmp_path / "cache").glob("microturn-*"))) == 5
    assert somebodys.exists()
    assert run(tmp_path) == "8 1"


def test_kernels_are_beside_their_sources_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (tmp_path / "constants.py").write_text(CONSTANTS.format(scale=1))
    (sources / "kernel.py").write_text(KERNEL)
    no_directory = tmp_path / "file"
    no_directory.write_text("")
    for number in (1, 40):
        (sources / "part.py").write_text(PART.format(number=number))
        assert run(tmp_path, no_directory) == f"{1 + number} 0"
        assert run(tmp_path, no_directory) == f"{1 + number} 1"
    assert list((sources / "__pycache__").glob("*.nbi"))


def test_our_kernels_are_in_the_cache_and_those_of_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text("import numba\n\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n")
    program = (
        "from microturn.model.cpu.kernels import rms_norm\n"
        "from others import double\n"
        "print(rms_norm.stats.cache_path, double.stats.cache_path, sep='\\n')"
    )
    environment = {**os.environ, "MICROTURN_CACHE": str(tmp_path / "own"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    ours, others = done.stdout.split()
    assert Path(ours).parent == tmp_path / "own" / "kernels"
    assert Path(others) == tmp_path / "__pycache__"


BITS = """
import hashlib
import sys
import numba
import numpy as np
from microturn.model.cpu import kernels
from microturn.model.cpu.angles import Angles

@numba.njit(nogil=True)
def caller(x, gain, eps, out):
    kernels.rms_norm(x, gain, eps, out)

def through(norm):
    out = np.empty_like(x)
    norm(x, gain, np.float32(1e-5), out)
    return out

draws = np.random.default_rng(0)
x, gain = draws.standard_normal((50, 49), np.float32), draws.standard_normal(49, np.float32)
norms = [kernels.rms_norm, caller] if sys.argv[1] == "the kernel first" else [caller, kernels.rms_norm]
results = [through(norm).tobytes() for norm in norms]

qkv, gains = draws.standard_normal((5, 10, 25), np.float32), draws.standard_normal((2, 25), np.float32)
q, (k, v) = np.empty((5, 6, 25), np.float32), np.empty((2, 5, 2, 25), np.float32)
angles = Angles(*draws.standard_normal((2, 5, 11), np.float32), is_interleaved=False)
kernels.split_heads(qkv, *gains, np.float32(1e-5), angles, q, k, v)
results += [b"".join(part.tobytes() for part in (q, k, v))]
print(*(hashlib.sha256(result).hexdigest() for result in results))
"""


def test_kernels_that_are_compiled_compute_the_bits_of_those_in_the_cache(tmp_path: Path) -> None:
    """A session goes on elsewhere to the bit: a server that starts for the first time must not compute otherwise."""

    def bits(order: str) -> list[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / order)}
        command = [sys.executable, "-c", BITS, order]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()

    runs = [bits(order) for order in 2 * ["the kernel first", "a caller first"]]
    assert len({norm for *norms, _ in runs for norm in norms}) == 1
    assert len({heads for *_, heads in runs}) == 1
