"""Kernels as compiled for other CPUs than this one: their tests, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from microturn.model.cpu import amx_products
from microturn.model.cpu.attention_operands import HAS_BFLOAT16
from microturn.model.cpu.integer_products import HAS_VNNI
from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512
from microturn.zoo.cache import default_cache_dir

ATTENTION = ["test_attention_kernels.py", "test_attention_scores.py"]
# Each type of pages and kind of test once, of soft caps and sink logits one: compiling takes most of the time. Pages in
# float32 have the cap, which is one step more: in the others all other steps are compiled without it too.
ONCE = "not torch.float32 and (cutting and None and not with or other_types and None or same_bits) or both and capped"
# As the kernels for this CPU, they are compiled again when their sources have changed. Numba keeps those of each list
# of features apart.
KEPT = default_cache_dir().absolute() / "kernels-of-other-cpus"
# The only pages whose products some instructions make: others are compiled with them as without.
PAGES_OF = {"avx512bf16": "bfloat16", "avx512vnni": "int8"}

BFLOAT16 = pytest.param("avx512bf16", marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no AVX512-BF16"))
VNNI = pytest.param("avx512vnni", marks=pytest.mark.skipif(not HAS_VNNI, reason="this CPU has no VNNI"))
AVX512 = pytest.param("avx512", marks=pytest.mark.skipif(not HAS_AVX512, reason="this CPU has no AVX-512"))


def run_tests(files: list[str], *arguments: str, lacking: str | None = None, kernels: Path = KEPT) -> str:
    """Runs tests of this folder; what pytest printed.

    Args:
        lacking: the beginning of the names of the features that kernels are compiled without.
        kernels: where they are kept.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kernels)}
    if lacking is not None:
        features = sorted(feature for feature in CPU_FEATURES if not feature.startswith(f"+{lacking}"))
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ",".join(features)}
    tests = [str(Path(__file__).with_name(name)) for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def num_passed(printed: str) -> int:
    return int(printed.split(" passed")[0].split()[-1])


@pytest.mark.parametrize("lacking", [BFLOAT16, VNNI, AVX512])
def test_attention_without_some_instructions(lacking: str) -> None:
    chosen = f"{PAGES_OF[lacking]} and ({ONCE})" if lacking in PAGES_OF else ONCE
    assert num_passed(run_tests(ATTENTION, "-k", chosen, lacking=lacking)) >= 20


@pytest.mark.parametrize("lacking", [VNNI, AVX512, "avx"])
def test_products_of_bytes_without_some_instructions(lacking: str) -> None:
    assert num_passed(run_tests(["test_integer_products.py"], lacking=lacking)) == 1


PRODUCTS = ["test_int8_products.py", "test_int8_linear.py"]


@pytest.mark.parametrize("lacking", [VNNI, AVX512])
def test_products_without_some_instructions(lacking: str) -> None:
    assert num_passed(run_tests([*PRODUCTS, "test_rotation.py"], "-k", "not amx", lacking=lacking)) >= 100


@pytest.mark.skipif(not HAS_VNNI, reason="CPUs with AMX have VNNI; without, inputs are integers of another type")
@pytest.mark.skipif(amx_products.is_available(), reason="this CPU has AMX, so that its products were tested")
def test_products_where_the_instructions_of_amx_are_emulated(tmp_path: Path) -> None:
    """With the linear modules, of which all products of many rows take its tiles.

    Its kernels call functions of the emulation, which may have changed: they are not kept.
    """
    printed = run_tests(PRODUCTS, "-p", "support.amx_emulation", kernels=tmp_path)
    assert num_passed(printed) >= 150
    assert "skipped" not in printed


WITHOUT_AMX = """
import torch
from microturn.model.cpu import amx_products
from microturn.model.cpu.int8_linear import Int8Linear
module = torch.nn.Linear(64, 48).requires_grad_(False)
x = torch.randn(40, 64)
torch.testing.assert_close(Int8Linear.of(module)(x, torch.empty(40, 48)), module(x), atol=0.04, rtol=0)
print(amx_products.is_available())
"""


def test_a_cpu_without_amx_multiplies_many_rows_as_well() -> None:
    """No code for it may be made there: LLVM would end the process."""
    features = ",".join(sorted(CPU_FEATURES - {"+amx-tile", "+amx-int8", "+amx-bf16"}))
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", WITHOUT_AMX], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
