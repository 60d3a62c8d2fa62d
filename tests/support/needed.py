"""Programs that some tests run and that no wheel brings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def needed(program: str | Path, hint: str) -> str:
    """Where a program is: by its name on PATH, or by its own path.

    Without it the test is skipped with the hint. Where MICROTURN_ALL_TESTS is set, as in CI, it fails.
    """
    if (found := shutil.which(program)) is not None:
        return found
    missing = f"this test runs {Path(program).name}, which is missing: {hint}"
    if os.environ.get("MICROTURN_ALL_TESTS"):
        pytest.fail(missing)
    pytest.skip(missing)
