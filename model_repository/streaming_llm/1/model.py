"""The module that Triton's Python backend loads."""

import gc

# What is imported stays. To scan it again and again for garbage would take a fifth of the start; the model's
# `initialize` sets it aside and has later objects scanned again.
gc.disable()

from microturn.model.lean_imports import import_transformers  # noqa: E402

import_transformers()

from microturn.hosts.triton.adapter import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
