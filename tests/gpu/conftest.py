"""What needs a GPU is skipped where there is none, in a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first one."""
    return torch.device("cuda", 0)
