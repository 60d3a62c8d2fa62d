"""The ways in which a model may be run here, for tests that must hold on each of them."""

from __future__ import annotations

from functools import partial

import pytest

from microturn.kv.page_layout import PageLayout
from support.driver import model_runner
from support.gpu_runner import gpu_runner

PATHS = pytest.mark.parametrize(
    "new_runner",
    [model_runner, partial(model_runner, layout=PageLayout.HND), gpu_runner],
    ids=["native", "torch", "as on a GPU"],
)
