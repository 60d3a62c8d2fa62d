"""Microturn: streaming sessions for language models on NVIDIA Triton Inference Server."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("microturn")
except _metadata.PackageNotFoundError:  # runs from its sources, without being installed
    __version__ = "unknown"
