"""Native attention as compiled for CPUs with fewer instructions than this one: its tests, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from microturn.model.cpu.attention_operands import HAS_BFLOAT16
from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512

# Each type of pages and kind of test once: compiling takes most of the time.
CHOSEN = "mixed or (cutting and None) or (other_types and None) or same_bits"


@pytest.mark.parametrize(
    "lacking",
    [
        pytest.param("avx512bf16", marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no AVX512-BF16")),
        pytest.param("avx512", marks=pytest.mark.skipif(not HAS_AVX512, reason="this CPU has no AVX-512")),
    ],
)
def test_attention_without_some_instructions(lacking: str, tmp_path: Path) -> None:
    features = ",".join(sorted(feature for feature in CPU_FEATURES if not feature.startswith(f"+{lacking}")))
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    tests = Path(__file__).with_name("test_attention_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 20
