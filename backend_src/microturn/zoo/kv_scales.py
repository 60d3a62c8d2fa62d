"""The scales of KV in 8-bit floats, as checkpoints name them: one for the keys of a layer, one for its values.

Keys and values divided by them are stored. compressed-tensors and AutoFP8 have them at the attention, Model Optimizer
and earlier releases of the others at the projections, the earliest one for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from microturn.zoo.quantized_format import Stored

_NAMES = {
    part: re.compile(rf"(.+?)\.(?:{part}_proj\.(?:{part}|output)_scale|(?:attn\.)?{part}_scale|kv_scale)")
    for part in ("k", "v")
}


def kv_scales(stored: Mapping[str, Stored]) -> dict[str, str]:
    """Our names, ``<attention>.k_scale`` and ``<attention>.v_scale``, with those of the tensors in a checkpoint.

    Scales of each head are none of these.
    """
    found: dict[str, str] = {}
    for ours, theirs in _matches(stored):
        if prod(stored[theirs].get_shape()) == 1:
            found.setdefault(ours, theirs)
    return found


def _matches(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in sorted(names):
        for part, pattern in _NAMES.items():
            if match := pattern.fullmatch(name):
                yield f"{match[1]}.{part}_scale", name
