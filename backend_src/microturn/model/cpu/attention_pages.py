"""Where the keys, values and scales of a head are in the pages of a layer (see `kv.page_layout` and `LayerPages`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.kv.page_layout import LANE_BYTES
from microturn.model.cpu.attention_panels import NUM_KEY_VECTORS
from microturn.model.cpu.vectors import LANES

_Array = NDArray[Any]


class PageShape(NamedTuple):
    """The pages of a layer.

    Attributes:
        page_size: tokens of a page.
        num_kv_heads: heads of keys.
        head_dim: elements of a head.
        terms: how many of them lie together.
        page_len: elements from a page to the next.
        scales_len: scales from a page to the next; 0 without any.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    terms: int
    page_len: int
    scales_len: int


@numba.njit(nogil=True)
def shape_of(kv: _Array, scales: _Array, page_size: int, num_kv_heads: int, head_dim: int) -> PageShape:
    """The shape of a layer's pages: their scales, if they have any, lie right behind the elements of their page."""
    num_vectors = 2 * num_kv_heads * page_size
    num_elements, terms = num_vectors * head_dim, LANE_BYTES // kv.itemsize
    if scales.shape[0] == 0:
        return PageShape(page_size, num_kv_heads, head_dim, terms, num_elements, 0)
    page_bytes = num_elements * kv.itemsize + num_vectors * scales.itemsize
    page_len, scales_len = page_bytes // kv.itemsize, page_bytes // scales.itemsize
    return PageShape(page_size, num_kv_heads, head_dim, terms, page_len, scales_len)


@numba.njit(nogil=True)
def starts_of(page: int, head: int, of: PageShape) -> tuple[int, int, int, int]:
    """Indices of the first element of a head's keys in a page, and of its values, and of the first scale of each."""
    keys, values = head * of.page_size, (of.num_kv_heads + head) * of.page_size
    elements, scales = page * of.page_len, page * of.scales_len
    return elements + keys * of.head_dim, elements + values * of.head_dim, scales + keys, scales + values


@numba.njit(nogil=True)
def locate(pages: _Array, first_key: int, end: int, of: PageShape, head: int, at: _Array) -> None:
    """Finds the vectors of keys of a block, and their values and scales (see `attention_panels.Block`).

    Those behind the last key are the first once more.

    Args:
        pages: of the keys from 0 on.
        first_key: of the block, at a multiple of PANEL_TOKENS in its page.
        end: of all keys.
        of: the pages.
        head: the first one of those that are attended.
        at: int64 [3 * NUM_KEY_VECTORS], written.
    """
    first_number, first_offset = first_key // of.page_size, first_key % of.page_size
    number, offset = first_number, first_offset
    for vector in range(NUM_KEY_VECTORS):
        if first_key + vector * LANES >= end:
            number, offset = first_number, first_offset
        elif offset == of.page_size:
            number, offset = number + 1, 0
        keys, values, key_scales, _ = starts_of(np.int64(pages[number]), head, of)
        at[vector] = keys + offset * of.terms
        at[NUM_KEY_VECTORS + vector] = values + offset * of.head_dim
        at[2 * NUM_KEY_VECTORS + vector] = key_scales + offset
        offset += LANES
