"""The angles of rotary embeddings (Su et al., 2021) for kernels: one for each pair of elements of a head.

Families differ in how many elements of a head are rotated, from none to all, and in which of them form a pair. Keys are
in pages as their model writes them, so that both are done here as the layer does them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.rotary import Layout, Rotary, Rotation, Turning

_Array = NDArray[Any]


class Angles(NamedTuple):
    """The angles of some vectors.

    Attributes:
        cos: float32 [n, pairs], contiguous; twice as many elements of a head are rotated, from the first one on.
        sin: the same.
        is_interleaved: whether neighbours are a pair; otherwise elements as far apart as there are pairs.
    """

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    is_interleaved: bool

    @classmethod
    def of(cls, rotary: Rotary, turning: Turning, positions: Tensor) -> Self:
        """Those of layers at positions, int64 [n]."""
        frequencies, scaling = rotary.frequencies(turning)
        # As `Rotary.angles`, by NumPy, which takes a third of the time for so few numbers.
        angles = positions.numpy()[:, None] * frequencies.numpy()
        cos, sin = ((part * scaling).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
        return cls(cos, sin, turning.pairs is Layout.INTERLEAVED)

    @classmethod
    def of_rotation(cls, rotation: Rotation) -> Self:
        """Those of a rotation."""
        cos, _ = rotation.layout.split(rotation.cos.squeeze(1))
        _, sin = rotation.layout.split(rotation.sin.squeeze(1))
        return cls(cos.contiguous().numpy(), sin.contiguous().numpy(), rotation.layout is Layout.INTERLEAVED)

    @classmethod
    def none(cls) -> Self:
        """Those of no vectors."""
        return cls(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32), is_interleaved=False)


@numba.njit(nogil=True)
def rotate(heads: _Array, angles: Angles, index: int, out: _Array) -> None:
    """Rotates heads [heads, head_dim] by the angles with an index, into out, another array of the same shape."""
    cos, sin = angles.cos[index], angles.sin[index]
    num_pairs = cos.shape[0]
    for head in range(heads.shape[0]):
        x, turned = heads[head], out[head]
        if angles.is_interleaved:
            for pair in range(num_pairs):
                first, second = x[2 * pair], x[2 * pair + 1]
                turned[2 * pair] = first * cos[pair] - second * sin[pair]
                turned[2 * pair + 1] = second * cos[pair] + first * sin[pair]
        else:
            for pair in range(num_pairs):
                first, second = x[pair], x[num_pairs + pair]
                turned[pair] = first * cos[pair] - second * sin[pair]
                turned[num_pairs + pair] = second * cos[pair] + first * sin[pair]
        for d in range(2 * num_pairs, x.shape[0]):
            turned[d] = x[d]
