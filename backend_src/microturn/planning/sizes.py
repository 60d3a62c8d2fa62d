"""Sizes for people."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """A size in bytes, KB, MB or GB."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} KB"
